"""The recurrence of a gated delta net over the rows of prompts, in chunks whose updates are solved for at
once (the WY form of arXiv 2406.06484 with the decays of arXiv 2412.06464), so that the work is products on
tensor cores: what `models/delta_net.py` does in torch.

The first launch prepares every chunk of every head, none of which waits for another; the second takes some
columns of the state of a head from chunk to chunk. Keys and queries have at most length one, decays are at
most one and the factors of updates at most two, and so is what follows from them: it is multiplied in
float16, whose 11 bits are those of TF32. What has the size of values is multiplied in TF32, rounded to it
first. Models in float32 are multiplied in float32.

Where each channel of keys has a decay (`BY_CHANNEL`), what a state keeps between two rows cannot be a factor
of their product. Each pair of rows belongs to one level: the two halves of some block of 2, 4, ... rows have
one each. The decays from the end of the first half to a row of the second, and from a row of the first half
to its end, are sums of numbers that are never positive; queries and keys are multiplied by the exponentials
of these, at most one, and each level is a product.

Chunks have 32 rows and not 64, for which Triton takes the tensor core instructions of Hopper: versions of
the first launch in those read beyond shared memory (triton 3.6, 2026-11-28).

Shapes: T rows, F channels of the convolution, H value heads, G key heads, K key dimension, V value dimension,
N rows of a chunk, C chunks.
"""

import math
from typing import Any

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, tl, triton, wait
from compress.kernels.delta_net.gates import delta_of
from compress.kernels.operands.recurrent_states import CHUNK, RecurrentStates, Sequences
from compress.kernels.recurrence.chunking import few_rows, sequences_at_once
from compress.kernels.recurrence.rounding import rounded
from compress.kernels.recurrence.rows import rows_of

MAX_KEY = 128
"""Numbers of a key whose products fit a multiprocessor."""
BOX = 64
SOLVE_WARPS = 4
CHANNEL_WARPS = 8
"""Columns that one product of the first launch has, and the warps of its programs; more where channels have
decays, which take as many registers as keys."""
COLUMNS = 16
WARPS = 2
STAGES = 4
WIDE_STAGES = 2
"""Columns of a state that one program of the second launch has, its warps, and its stages; fewer in float32,
whose chunks are twice as large."""


@jit()
def _solve(
    mixed_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    own_ptr: tl.tensor,
    of_state_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_sequences: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    N: tl.constexpr,
    LEVELS: tl.constexpr,
    FEW: tl.constexpr,
    REST: tl.constexpr,
    K_TILE: tl.constexpr,
    V_TILE: tl.constexpr,
    BOX: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute what a chunk of a head asks of the state before it, and gives to the one after it."""
    launch_dependents(PDL)
    head = tl.program_id(1)
    chunk_at = chunks_ptr + tl.program_id(0) * 4
    idx = tl.arange(0, N)
    k_idx = tl.arange(0, K_TILE)[None, :]
    row = idx[:, None]
    column = idx[None, :]
    wait(PDL)
    first_row = tl.load(chunk_at)
    sequence = tl.load(chunk_at + 3)
    start = tl.load(starts_ptr + sequence)
    stop = tl.load(starts_ptr + sequence + 1, mask=sequence + 1 < num_sequences, other=num_rows)
    size = tl.minimum(tl.load(chunk_at + 1), stop - REST - first_row)
    if (size > 0) & (stop - start > FEW):
        TF32: tl.constexpr = PRECISION == "tf32"
        dtype = of_state_ptr.dtype.element_ty
        place = ((start // N + sequence + (first_row - start) // N) * H + head).to(tl.int64)
        rows = (first_row + idx).to(tl.int64)
        real = idx < size
        mixed_at = mixed_ptr + rows[:, None] * F
        key_at = mixed_at + head // (H // G) * K
        D: tl.constexpr = H * K if BY_CHANNEL else H
        gate_at = gates_ptr + rows * (D + H)
        beta = tl.load(gate_at + D + head, mask=real, other=0.0)
        key_real = real[:, None] & (k_idx < K)
        q = tl.load(key_at + k_idx, mask=key_real, other=0.0)
        k = tl.load(key_at + G * K + k_idx, mask=key_real, other=0.0)
        if BY_CHANNEL:
            decay = tl.load(gate_at[:, None] + head * K + k_idx, mask=key_real, other=0.0)
            total = tl.cumsum(decay, axis=0)
            whole = tl.sum(decay, axis=0)[None, :]
            tl.store(kept_ptr + place * K_TILE + k_idx, tl.exp(whole))
            from_start = tl.exp(total)
            until_end = tl.exp(tl.minimum(whole - total, 0.0))
        else:
            decay = tl.load(gate_at + head, mask=real, other=0.0)
            total = tl.cumsum(decay, axis=0)
            whole = tl.sum(decay, axis=0)
            tl.store(kept_ptr + place, tl.exp(whole))
            from_start = tl.exp(total)[:, None]
            until_end = tl.exp(tl.minimum(whole - total, 0.0))[:, None]
        within = place * (N * K_TILE) + row * K_TILE + k_idx
        tl.store(query_ptr + within, (q * from_start).to(dtype))
        turned = place * (N * K_TILE) + k_idx * N + row
        tl.store(key_ptr + turned, (k * until_end).to(dtype))
        if BY_CHANNEL:
            scores = tl.where(row == column, tl.sum(q * k, axis=1)[:, None], 0.0)
            alike = tl.zeros((N, N), tl.float32)
            for level in tl.static_range(LEVELS):
                half = row // (1 << level)
                second = half % 2 == 1
                middle = (half // 2 * 2 + 1) * (1 << level)
                after = second & (column >= middle) & (column <= row)
                until = (half % 2 == 0) & (column > row) & (column < middle)
                between = tl.where(after | until, 1.0, 0.0)
                kept = tl.exp(tl.dot(between, decay, input_precision="tf32x3" if TF32 else "ieee"))
                first_keys = tl.trans((k * kept).to(dtype))
                pair = second & (column // (1 << level) == half - 1)
                of_level = tl.dot((q * kept).to(dtype), first_keys, input_precision=PRECISION)
                scores = tl.where(pair, of_level, scores)
                of_level = tl.dot((k * kept).to(dtype), first_keys, input_precision=PRECISION)
                alike = tl.where(pair, of_level, alike)
        else:
            q = q.to(dtype)
            k = k.to(dtype)
            kept = tl.exp(tl.where(row >= column, total[:, None] - total[None, :], float("-inf")))
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * kept
            alike = tl.dot(k, tl.trans(k), input_precision=PRECISION) * kept
        tl.store(scores_ptr + place * (N * N) + row * N + column, scores.to(dtype))
        system = tl.where(row > column, alike * beta[:, None], 0.0)
        # The inverse of 1 + system, whose diagonal blocks grow by two: [[a, 0], [-b s a, b]] of each pair.
        inverse = tl.where(row == column, 1.0, 0.0)
        for level in tl.static_range(LEVELS):
            pair = row // (2 << level) == column // (2 << level)
            under = pair & (row // (1 << level) % 2 == 1) & (column // (1 << level) % 2 == 0)
            between = tl.where(under, system, 0.0)
            if level == 0:
                inverse = inverse - between
            else:
                factor = inverse.to(dtype)
                right = tl.dot(between.to(dtype), factor, input_precision=PRECISION)
                inverse -= tl.dot(factor, right.to(dtype), input_precision=PRECISION)
        factor = inverse.to(dtype)
        for begin in tl.static_range(0, K_TILE, BOX):
            d = begin + tl.arange(0, BOX)[None, :]
            box = tl.load(key_at + G * K + d, mask=real[:, None] & (d < K), other=0.0)
            if BY_CHANNEL:
                of_box = tl.load(gate_at[:, None] + head * K + d, mask=real[:, None] & (d < K), other=0.0)
                box = (box * (beta[:, None] * tl.exp(tl.cumsum(of_box, axis=0)))).to(dtype)
            else:
                box = (box * (beta * tl.exp(total))[:, None]).to(dtype)
            solved = tl.dot(factor, box, input_precision=PRECISION)
            at = of_state_ptr + place * (N * K_TILE) + row * K_TILE + d
            tl.store(at, solved.to(dtype))
        for begin in tl.static_range(0, V_TILE, BOX):
            d = begin + tl.arange(0, BOX)[None, :]
            at = mixed_at + 2 * G * K + head * V + d
            box = tl.load(at, mask=real[:, None] & (d < V), other=0.0)
            box = rounded(box * beta[:, None], TF32)
            solved = tl.dot(factor.to(tl.float32), box, input_precision=PRECISION)
            tl.store(own_ptr + place * (N * V_TILE) + row * V_TILE + d, solved)


@jit()
def _advance(
    own_ptr: tl.tensor,
    of_state_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    kept_ptr: tl.tensor,
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
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    FEW: tl.constexpr,
    REST: tl.constexpr,
    KEPT: tl.constexpr,
    K_TILE: tl.constexpr,
    V_TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    SAVES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Take some columns of the state of one head from the first chunk to the last of sequences with more
    than FEW rows, but for the last REST rows."""
    launch_dependents(PDL)
    head = tl.program_id(1)
    row = tl.arange(0, N)[:, None]
    column = tl.arange(0, N)[None, :]
    k_row = tl.arange(0, K_TILE)[:, None]
    k_column = tl.arange(0, K_TILE)[None, :]
    v_idx = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    wait(PDL)
    sequence = tl.program_id(0)
    start, stop, first, slot = rows_of(
        sequence, starts_ptr, context_lens_ptr, slots_ptr, num_rows, num_sequences
    )
    while start < num_rows:
        if stop - start > FEW:
            length = stop - start - REST
            TF32: tl.constexpr = PRECISION == "tf32"
            inner = head * K * V + v_idx * K + k_row
            real = (k_row < K) & (v_idx < V)
            before = states_ptr + (slot * KEPT + tl.maximum(first - 1, 0) % KEPT) * (H * K * V)
            state = tl.load(before + inner, mask=real & (first > 0), other=0.0)
            place = ((start // N + sequence) * H + head).to(tl.int64)
            of_state_at = of_state_ptr + place * (N * K_TILE) + row * K_TILE + k_column
            query_at = query_ptr + place * (N * K_TILE) + row * K_TILE + k_column
            key_at = key_ptr + place * (N * K_TILE) + k_row * N + column
            scores_at = scores_ptr + place * (N * N) + row * N + column
            own_at = own_ptr + place * (N * V_TILE) + row * V_TILE + v_idx
            kept_at = kept_ptr + place * K_TILE + k_row if BY_CHANNEL else kept_ptr + place
            out_at = out_ptr + (start + row).to(tl.int64) * (H * V) + head * V + v_idx
            if SAVES:
                wanted = tl.load(wanted_ptr + slot * 2) - first
                saved_at = saved_ptr + tl.load(wanted_ptr + slot * 2 + 1).to(tl.int64) * (H * K * V) + inner
            for begin in range(0, length, N):
                if SAVES:
                    tl.store(saved_at, state, mask=real & (begin == wanted) & (wanted > 0))
                of_state = tl.load(of_state_at).to(tl.float32)
                query = tl.load(query_at).to(tl.float32)
                key = tl.load(key_at).to(tl.float32)
                scores = tl.load(scores_at).to(tl.float32)
                own = tl.load(own_at)
                kept = tl.load(kept_at)
                found = rounded(state, TF32)
                update = own - tl.dot(of_state, found, input_precision=PRECISION)
                update = rounded(update, TF32)
                out = tl.dot(query, found, input_precision=PRECISION)
                out = tl.dot(scores, update, out, input_precision=PRECISION)
                state = tl.dot(key, update, state * kept, input_precision=PRECISION)
                out_real = (row < length - begin) & (v_idx < V)
                tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=out_real)
                of_state_at += H * N * K_TILE
                query_at += H * N * K_TILE
                key_at += H * N * K_TILE
                scores_at += H * N * N
                own_at += H * N * V_TILE
                kept_at += H * K_TILE if BY_CHANNEL else H
                out_at += N * H * V
            after = states_ptr + (slot * KEPT + (first + length - 1) % KEPT) * (H * K * V)
            tl.store(after + inner, state, mask=real)
            if SAVES:
                tl.store(saved_at, state, mask=real & (length == wanted))
        sequence += tl.num_programs(0)
        start, stop, first, slot = rows_of(
            sequence, starts_ptr, context_lens_ptr, slots_ptr, num_rows, num_sequences
        )


def recur(
    mixed_TF: Tensor,
    gates_TH: Tensor,
    states: RecurrentStates,
    sequences: Sequences,
    out_TZ: Tensor,
    options: dict[str, Any],
) -> None:
    """Write the outputs of sequences that have more than `few_rows` rows in the pass, and the state after.
    The last rows, one fewer than the states that are kept, are left out.

    `mixed_TF` are queries, keys and values, `gates_TH` the log of what a state keeps and the factor of
    updates [T, D + H], all float32; D are the decays of all heads.
    """
    assert sequences.chunks_C4 is not None
    delta = delta_of(states)
    by_channel = delta.by_channel
    device = mixed_TF.device
    is_wide = out_TZ.dtype == torch.float32
    dtype = torch.float32 if is_wide else torch.float16
    num_rows = len(mixed_TF)
    num_heads = delta.num_heads
    num_sequences = len(sequences.starts_R)
    k_tile = max(16, triton.next_power_of_2(delta.key_dim))
    v_tile = max(COLUMNS, triton.next_power_of_2(delta.value_dim))
    # Chunk c of sequence r is in place starts[r] // N + r + c, which no other chunk has.
    places = num_rows // CHUNK + num_sequences, num_heads

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*places, *shape, dtype=dtype, device=device)

    prepared = (
        empty(CHUNK, v_tile, dtype=torch.float32),
        empty(CHUNK, k_tile),
        empty(CHUNK, CHUNK),
        empty(CHUNK, k_tile),
        empty(k_tile, CHUNK),
        empty(*((k_tile,) if by_channel else ()), dtype=torch.float32),
    )
    shared = {
        "H": num_heads,
        "K": delta.key_dim,
        "V": delta.value_dim,
        "N": CHUNK,
        "FEW": few_rows(states.num_kept),
        "REST": states.num_kept - 1,
        "K_TILE": k_tile,
        "V_TILE": v_tile,
        "BY_CHANNEL": by_channel,
        "PRECISION": "ieee" if is_wide else "tf32",
        **options,
    }
    _solve[(len(sequences.chunks_C4), num_heads)](
        mixed_TF,
        gates_TH,
        sequences.starts_R,
        sequences.chunks_C4,
        *prepared,
        num_rows,
        num_sequences,
        G=delta.num_key_heads,
        F=delta.num_channels,
        LEVELS=CHUNK.bit_length() - 1,
        BOX=min(BOX, k_tile, v_tile),
        num_warps=CHANNEL_WARPS if by_channel else SOLVE_WARPS,
        **shared,
    )
    parts = num_heads, triton.cdiv(delta.value_dim, COLUMNS)
    _advance[(sequences_at_once(num_sequences, math.prod(parts)), *parts)](
        *prepared,
        states.heads,
        *states.saved_heads,
        sequences.context_lens_R,
        sequences.slots_R,
        sequences.starts_R,
        out_TZ,
        num_rows,
        num_sequences,
        KEPT=states.num_kept,
        COLUMNS=COLUMNS,
        SAVES=states.saving is not None,
        num_warps=WARPS,
        num_stages=WIDE_STAGES if is_wide else STAGES,
        **shared,
    )
