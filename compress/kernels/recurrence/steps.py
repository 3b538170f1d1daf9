"""A recurrence over rows one after the other: all of a decode step, a few of a prompt, and the last of a
prompt that leave states of their own. A delta net replaces what a state holds of a key, others add to it.

One program has some columns of the state of a head in registers and goes from row to row, so the bits of a
row do not depend on how many rows of its sequence a step has. What a state keeps is a number of its head, or
one for each row of keys.

Shapes: T rows, F channels of the convolution, Z = H V, H heads, G key heads, D decays, K key dimension,
V value dimension, N states of a slot.
"""

import math
from typing import Any

from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, tl, triton, wait
from compress.kernels.operands.recurrent_states import RecurrentStates, Sequences
from compress.kernels.recurrence.chunking import sequences_at_once
from compress.kernels.recurrence.rows import rows_of

COLUMNS = 8
WARPS = 1
"""Columns of a state that one program has, and its warps."""


@jit()
def _recur(
    mixed_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    states_ptr: tl.tensor,
    saved_ptr: tl.tensor,
    wanted_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_sequences: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    N: tl.constexpr,
    K_TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEW: tl.constexpr,
    REPLACES: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    SAVES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Take some columns of the state of one head from the first row of sequences to the last; of a sequence
    with more than FEW rows, through the last N - 1."""
    launch_dependents(PDL)
    D: tl.constexpr = H * K if BY_CHANNEL else H
    head = tl.program_id(1)
    # Rows and columns of one layout, so that nothing moves between threads but the sums.
    k_idx = tl.arange(0, K_TILE)[None, :]
    v_idx = (tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS))[:, None]
    k_real = k_idx < K
    v_real = v_idx < V
    wait(PDL)
    sequence = tl.program_id(0)
    start, stop, position, slot = rows_of(
        sequence, starts_ptr, context_lens_ptr, slots_ptr, num_rows, num_sequences
    )
    while start < num_rows:
        begin = tl.where(stop - start > FEW, stop - (N - 1), start)
        length = stop - begin
        first = position + (begin - start)
        inner = head * K * V + v_idx * K + k_idx
        real = v_real & k_real & (length > 0)
        if SAVES:
            wanted = tl.load(wanted_ptr + slot * 2) - first - 1
            saved_at = saved_ptr + tl.load(wanted_ptr + slot * 2 + 1).to(tl.int64) * (H * K * V) + inner
        place = slot * N + tl.maximum(first - 1, 0) % N
        state = tl.load(states_ptr + place * (H * K * V) + inner, mask=real & (first > 0), other=0.0)
        q_at = mixed_ptr + begin.to(tl.int64) * F + head // (H // G) * K + k_idx
        v_at = mixed_ptr + begin.to(tl.int64) * F + 2 * G * K + head * V + v_idx
        gate_at = gates_ptr + begin.to(tl.int64) * (D + H)
        keep_at = gate_at + head * K + k_idx if BY_CHANNEL else gate_at + head
        factor_at = gate_at + D + head
        out_at = out_ptr + begin.to(tl.int64) * (H * V) + head * V + v_idx
        # The operands of a row are loaded while the row before it is computed.
        q_next = tl.load(q_at, mask=k_real & (length > 0), other=0.0).to(tl.float32)
        k_next = tl.load(q_at + G * K, mask=k_real & (length > 0), other=0.0).to(tl.float32)
        v_next = tl.load(v_at, mask=v_real & (length > 0), other=0.0).to(tl.float32)
        keep_next = tl.load(keep_at, mask=(k_real & (length > 0)) if BY_CHANNEL else length > 0, other=0.0)
        factor_next = tl.load(factor_at, mask=length > 0, other=0.0)
        for idx in range(length):
            q = q_next
            k = k_next
            v = v_next
            keep = tl.exp(keep_next)
            factor = factor_next
            q_at += F
            v_at += F
            keep_at += D + H
            factor_at += D + H
            follows = idx + 1 < length
            q_next = tl.load(q_at, mask=k_real & follows, other=0.0).to(tl.float32)
            k_next = tl.load(q_at + G * K, mask=k_real & follows, other=0.0).to(tl.float32)
            v_next = tl.load(v_at, mask=v_real & follows, other=0.0).to(tl.float32)
            keep_next = tl.load(keep_at, mask=(k_real & follows) if BY_CHANNEL else follows, other=0.0)
            factor_next = tl.load(factor_at, mask=follows, other=0.0)
            # Both products with the state before the row, so that neither waits for the other.
            if BY_CHANNEL:
                held = tl.sum(state * (k * keep), axis=1, keep_dims=True)
                found = tl.sum(state * (q * keep), axis=1, keep_dims=True)
            else:
                if REPLACES:
                    held = tl.sum(state * k, axis=1, keep_dims=True) * keep
                found = tl.sum(state * q, axis=1, keep_dims=True) * keep
            if REPLACES:
                v -= held
            update = v * factor
            out = found + update * tl.sum(k * q, axis=1, keep_dims=True)
            state = state * keep + update * k
            tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=v_real)
            if idx >= length - N:
                kept = slot * N + tl.maximum(first + idx, 0) % N
                tl.store(states_ptr + kept * (H * K * V) + inner, state, mask=real)
            if SAVES:
                tl.store(saved_at, state, mask=real & (idx == wanted))
            out_at += H * V
        sequence += tl.num_programs(0)
        start, stop, position, slot = rows_of(
            sequence, starts_ptr, context_lens_ptr, slots_ptr, num_rows, num_sequences
        )


def recur(
    mixed_TF: Tensor,
    gates_TH: Tensor,
    states: RecurrentStates,
    sequences: Sequences,
    out_TZ: Tensor,
    options: dict[str, Any],
    *,
    few_rows: int,
    replaces: bool,
    by_channel: bool = False,
) -> None:
    """Write the outputs and the states of sequences with at most `few_rows` rows in the pass, and of others
    of the last rows, one fewer than the states that are kept.

    `mixed_TF` are queries, keys and values of any dtype, `gates_TH` the log of what a state keeps and the
    factor of updates [T, D + H], float32. An update `replaces` what the state holds of its key, or is added.
    Where decays are `by_channel`, which is for updates that replace, D is H K, and else H.
    """
    assert replaces or not by_channel
    facts = states.recurrence
    num_sequences = len(sequences.starts_R)
    is_prompt = sequences.chunks_C4 is not None
    parts = facts.num_heads, triton.cdiv(facts.value_dim, COLUMNS)
    at_once = sequences_at_once(num_sequences, math.prod(parts)) if is_prompt else num_sequences
    _recur[(at_once, *parts)](
        mixed_TF,
        gates_TH,
        states.heads,
        *states.saved_heads,
        sequences.context_lens_R,
        sequences.slots_R,
        sequences.starts_R,
        out_TZ,
        len(mixed_TF),
        num_sequences,
        H=facts.num_heads,
        G=facts.num_key_heads,
        K=facts.key_dim,
        V=facts.value_dim,
        F=facts.num_channels,
        N=states.num_kept,
        K_TILE=triton.next_power_of_2(facts.key_dim),
        COLUMNS=COLUMNS,
        FEW=few_rows,
        REPLACES=replaces,
        BY_CHANNEL=by_channel,
        SAVES=is_prompt and states.saving is not None,
        num_warps=WARPS,
        **options,
    )
