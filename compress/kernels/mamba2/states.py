"""The states of Mamba-2 mixers before the chunks of prompts, in Triton: all that one chunk waits for of
another.

In a model in bfloat16 what has 16 bits is multiplied as it is, and a float32 factor is two numbers in
bfloat16 that follow one another, 16 bits in all (`PAIRS`). Beside float16, whose range is not that of
float32, it is rounded to TF32 and multiplied so, and so it is with states narrower than `PAIRED_SIZE`
(`docs/LOG.md`, 2026-11-28).

Shapes: T rows, F channels of the convolution, H heads, G groups, K state size, V dimension of a head, N rows
of a chunk, P places of states.
"""

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, tl, triton, wait
from compress.kernels.operands.recurrent_states import LONG_CHUNK, RecurrentStates, Sequences, num_places
from compress.kernels.recurrence.rounding import rounded
from compress.kernels.recurrence.rows import rows_of

COLUMNS = 16
WARPS = 4
STAGES = 3
"""Columns of a state that one program has, its warps and its stages."""
PAIRED_SIZE = 128
"""The size of a state that is multiplied in pairs, which published models have; none narrower."""
MOST_NARROW = 400
WIDE_COLUMNS = 32
WIDE_WARPS = 2
WIDE_STAGES = 2
"""Columns, warps and stages where a sequence would have more programs than an H200 runs at once."""


@jit()
def totals(gate_at: tl.tensor, real: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the sums of the logs of decays up to each row of a chunk, and up to its last. The sums of
    numbers of one sign fall, so the last is the least in any order of rows."""
    decay = tl.load(gate_at, mask=real, other=0.0)
    total = tl.cumsum(decay, axis=0)
    return total, tl.min(total, axis=0)


@jit()
def wide_times(x: tl.tensor, a: tl.tensor, total: tl.tensor, PAIRS: tl.constexpr) -> tl.tensor:
    """Return the product of float32 numbers and a matrix in 16 bits, added to others."""
    if PAIRS:
        upper = x.to(tl.bfloat16)
        lower = (x - upper.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(upper, a, tl.dot(lower, a, total))
    return tl.dot(rounded(x, True), a.to(tl.float32), total, input_precision="tf32")


@jit()
def times_wide(a: tl.tensor, x: tl.tensor, PAIRS: tl.constexpr) -> tl.tensor:
    """Return the product of a matrix in 16 bits and the transpose of one of float32 numbers."""
    if PAIRS:
        upper = x.to(tl.bfloat16)
        lower = (x - upper.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(a, tl.trans(upper), tl.dot(a, tl.trans(lower)))
    return tl.dot(a.to(tl.float32), tl.trans(rounded(x, True)), input_precision="tf32")


@jit()
def advanced(
    state: tl.tensor,
    k: tl.tensor,
    update: tl.tensor,
    total: tl.tensor,
    whole: tl.tensor,
    PAIRS: tl.constexpr,
) -> tl.tensor:
    """Return the state [V, K] after a chunk, of its keys [N, K] and what is added of its rows [V, N]."""
    to_end = update * tl.exp(tl.minimum(whole - total, 0.0))[None, :]
    return wide_times(to_end, k, state * tl.exp(whole), PAIRS)


@jit()
def save(saved_at: tl.tensor, real: tl.tensor, state: tl.tensor, is_wanted: tl.tensor) -> None:
    """Save a state if it is wanted; in a branch, since threads exchange numbers before they store any."""
    if is_wanted:
        tl.store(saved_at, state, mask=real)


@jit()
def save_within(
    saved_at: tl.tensor,
    real: tl.tensor,
    state: tl.tensor,
    k: tl.tensor,
    update: tl.tensor,
    total: tl.tensor,
    num_first: tl.tensor,
    size: tl.tensor,
    idx: tl.tensor,
    PAIRS: tl.constexpr,
) -> None:
    """Save the state after the first rows of a chunk, if it is one after some of its rows but not all."""
    if (num_first > 0) & (num_first < size):
        whole = tl.min(tl.where(idx < num_first, total, 0.0), axis=0)
        early = tl.where((idx < num_first)[None, :], update, 0.0)
        tl.store(saved_at, advanced(state, k, early, total, whole, PAIRS), mask=real)


@jit(varying=("num_rows", "num_sequences"))
def _pass_states(
    mixed_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    states_ptr: tl.tensor,
    before_ptr: tl.tensor,
    saved_ptr: tl.tensor,
    wanted_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_sequences: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    N: tl.constexpr,
    KEPT: tl.constexpr,
    K_TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SAVES: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Take some columns of the state of one head from the first chunk to the last of sequences with more
    than N rows, but for the last KEPT - 1 rows, and write the state before every chunk."""
    launch_dependents(PDL)
    head = tl.program_id(1)
    idx = tl.arange(0, N)
    row = idx[:, None]
    column = idx[None, :]
    k_idx = tl.arange(0, K_TILE)[None, :]
    v_idx = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    inner = head * K * V + v_idx * K + k_idx
    real = (k_idx < K) & (v_idx < V)
    k_inner = (G + head // (H // G)) * K + row * F + k_idx
    v_inner = 2 * G * K + head * V + column * F + v_idx
    wait(PDL)
    sequence = tl.program_id(0)
    start, stop, first, slot = rows_of(
        sequence, starts_ptr, context_lens_ptr, slots_ptr, num_rows, num_sequences
    )
    while start < num_rows:
        length = stop - start - (KEPT - 1)
        if length > N:
            at = states_ptr + (slot * KEPT + tl.maximum(first - 1, 0) % KEPT) * (H * K * V)
            state = tl.load(at + inner, mask=real & (first > 0), other=0.0)
            place = start // N + tl.minimum(sequence, start // N)
            before_at = before_ptr + place.to(tl.int64) * (H * K * V) + inner
            mixed_at = mixed_ptr + start.to(tl.int64) * F
            gate_at = gates_ptr + start.to(tl.int64) * (2 * H) + head
            if SAVES:
                wanted = tl.load(wanted_ptr + slot * 2) - first
                saved = tl.load(wanted_ptr + slot * 2 + 1).to(tl.int64)
                saved_at = saved_ptr + saved * (H * K * V) + inner
            for begin in range(0, length, N):
                tl.store(before_at, state, mask=real)
                left = length - begin
                k = tl.load(mixed_at + k_inner, mask=(row < left) & (k_idx < K), other=0.0)
                v = tl.load(mixed_at + v_inner, mask=(column < left) & (v_idx < V), other=0.0).to(tl.float32)
                total, whole = totals(gate_at + idx * (2 * H), idx < left)
                factor = tl.load(gate_at + H + idx * (2 * H), mask=idx < left, other=0.0)
                update = v * factor[None, :]
                size = tl.minimum(left, N)
                if SAVES:
                    save_within(saved_at, real, state, k, update, total, wanted - begin, size, idx, PAIRS)
                state = advanced(state, k, update, total, whole, PAIRS)
                if SAVES:
                    save(saved_at, real, state, wanted - begin == size)
                before_at += H * K * V
                mixed_at += N * F
                gate_at += N * 2 * H
            after = states_ptr + (slot * KEPT + (first + length - 1) % KEPT) * (H * K * V)
            tl.store(after + inner, state, mask=real)
        sequence += tl.num_programs(0)
        start, stop, first, slot = rows_of(
            sequence, starts_ptr, context_lens_ptr, slots_ptr, num_rows, num_sequences
        )


def in_pairs(state_size: int, dtype: torch.dtype) -> bool:
    """Return whether float32 factors are multiplied as pairs of numbers in bfloat16."""
    return dtype == torch.bfloat16 and state_size >= PAIRED_SIZE


def pass_states(mixed_TF: Tensor, gates_TH: Tensor, states: RecurrentStates, sequences: Sequences) -> Tensor:
    """Return the states [P, H, V, K] before all chunks of sequences that have more than one, float32, and
    write and save the states of such sequences. The last rows, one fewer than the states that are kept, are
    left out. Operands are those of `recurrence/steps.py`, queries, keys and values in 16 bits.

    The launch waits for the end of the one before, so that its programs, which all take as long, find equal
    room on all multiprocessors (`docs/LOG.md`, 2026-11-28)."""
    mamba = states.recurrence
    num_rows = len(mixed_TF)
    num_sequences = len(sequences.starts_R)
    places = num_places(num_rows, num_sequences)
    before_PHVK = torch.empty(places, *states.heads.shape[2:], dtype=torch.float32, device=mixed_TF.device)
    if not places:
        return before_PHVK
    is_wide = mamba.num_heads * triton.cdiv(mamba.value_dim, COLUMNS) > MOST_NARROW
    columns = WIDE_COLUMNS if is_wide else COLUMNS
    most = min(num_sequences, num_rows // LONG_CHUNK)
    _pass_states[(most, mamba.num_heads, triton.cdiv(mamba.value_dim, columns))](
        mixed_TF,
        gates_TH,
        states.heads,
        before_PHVK,
        *states.saved_heads,
        sequences.context_lens_R,
        sequences.slots_R,
        sequences.starts_R,
        num_rows,
        num_sequences,
        H=mamba.num_heads,
        G=mamba.num_key_heads,
        K=mamba.key_dim,
        V=mamba.value_dim,
        F=mamba.num_channels,
        N=LONG_CHUNK,
        KEPT=states.num_kept,
        K_TILE=max(16, triton.next_power_of_2(mamba.key_dim)),
        COLUMNS=columns,
        SAVES=states.saving is not None,
        PAIRS=in_pairs(mamba.key_dim, mixed_TF.dtype),
        num_warps=WIDE_WARPS if is_wide else WARPS,
        num_stages=WIDE_STAGES if is_wide else STAGES,
        PDL=False,
    )
    return before_PHVK
