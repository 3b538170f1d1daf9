"""The recurrence of a Mamba-1 mixer over the rows of prompts, in chunks that three launches compute at once.

A state after some rows is, in each of its numbers, exp(rate (dt_1 + ... + dt_n)) S + E, where S is the state
before them and E the state that they leave where S is zero. The first launch computes the sum of dt and E of
every chunk, none of which waits for another. The second takes the states of sequences from chunk to chunk by
these alone, and writes the one before each. The third takes each chunk from there row after row, and computes
the outputs. That is twice the exponentials of one walk over the
rows, but all chunks of `CHUNK` rows are under way at once.

So the bits of a row do not depend on its company; nor, where slots keep one state, on where a sequence is
cut, if it is after a multiple of `CHUNK` rows and what follows has more than a few. Where slots keep the
states of several last rows, as with drafts, these rows are taken one by one.

With states of 16 numbers one thread has all numbers of the states of its channels, so that sums over a state
move nothing between threads; those of wider states may be shared among threads.

Shapes: T rows, V channels, K numbers of the state of a channel, N rows of a chunk, P places of chunks.
"""

from typing import Any

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, tl, triton, wait
from compress.kernels.operands.recurrent_states import CHUNK, RecurrentStates, Sequences
from compress.kernels.operands.selective import PLACE_ROWS, ScanRows, ScanWeights, num_scan_places
from compress.kernels.recurrence.chunking import few_rows, sequences_at_once
from compress.kernels.recurrence.rows import rows_of
from compress.kernels.selective_scan.rows import save_if, softplus

CHANNELS = 64
NUMBERS_OF_TILE = 2048
"""Channels of a program of one warp that takes a chunk row after row, and numbers of their states, at most.
With states of 16 numbers a thread has two channels, which share what it loads of B and C."""
WIDE = 128
CHANNELS_OF_WIDE = 8
NUMBERS_OF_WARP = 64
"""Numbers from which on a state has programs of fewer channels and more warps, which have so many numbers of
each channel. `docs/LOG.md` (2026-11-30) has times of states of 64."""
NUMBERS = 128
PASS_WARPS = 4
PASS_STAGES = 4
"""Numbers of a state of a program that goes from chunk to chunk, its warps, and the chunks it loads ahead."""
MORE_CHUNKS = 8
"""Programs more than whole chunks, for the last ones of sequences; where there are more, they take turns."""
LOG2_E = 1.4426950408889634


@jit(varying=("num_rows", "num_sequences", "num_chunks", "x_stride", "gate_stride", "dt_stride", "bc_stride"))
def _take_chunks(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    bc_ptr: tl.tensor,
    rate_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    skip_ptr: tl.tensor,
    chunk_states_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_sequences: tl.tensor,
    num_chunks: tl.tensor,
    x_stride: tl.tensor,
    gate_stride: tl.tensor,
    dt_stride: tl.tensor,
    bc_stride: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    FEW: tl.constexpr,
    KEPT: tl.constexpr,
    PLACE: tl.constexpr,
    LOG2_E: tl.constexpr,
    K_TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Take some channels of chunks row after row, in sequences with more than FEW rows, but for their last
    KEPT - 1 rows. With OUTPUTS, from the state before a chunk, to compute the gated outputs. Else from zeros,
    to compute the state after it, and the sum of dt."""
    launch_dependents(PDL)
    k_idx = tl.arange(0, K_TILE)[:, None]
    v_idx = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    k_real = k_idx < K
    v_real = v_idx < V
    real = k_real & v_real
    rate = tl.load(rate_ptr + v_idx * K + k_idx, mask=real, other=0.0) * LOG2_E
    bias = tl.load(bias_ptr + v_idx, mask=v_real, other=0.0)
    if OUTPUTS:
        skip = tl.load(skip_ptr + v_idx, mask=v_real, other=0.0)
    wait(PDL)
    chunk = tl.program_id(0)
    chunk_rows = tl.load(chunks_ptr + chunk * 4 + 1)
    while chunk_rows > 0:
        first_row = tl.load(chunks_ptr + chunk * 4)
        sequence = tl.load(chunks_ptr + chunk * 4 + 3)
        start, stop, _first, _slot = rows_of(
            sequence, starts_ptr, context_lens_ptr, slots_ptr, num_rows, num_sequences
        )
        size = tl.minimum(chunk_rows, stop - (KEPT - 1) - first_row)
        if (stop - start > FEW) & (size > 0):
            place = (start // PLACE + (first_row - start) // N).to(tl.int64)
            state_at = chunk_states_ptr + place * (K * V) + k_idx * V + v_idx
            row = first_row.to(tl.int64)
            x_at = x_ptr + row * x_stride + v_idx
            gate_at = gate_ptr + row * gate_stride + v_idx
            dt_at = dt_ptr + row * dt_stride + v_idx
            b_at = bc_ptr + row * bc_stride + k_idx
            out_at = out_ptr + row * V + v_idx
            # The operands of a row are loaded while the row before it is computed.
            x_next = tl.load(x_at, mask=v_real, other=0.0)
            dt_next = tl.load(dt_at, mask=v_real, other=0.0)
            b_next = tl.load(b_at, mask=k_real, other=0.0)
            if OUTPUTS:
                gate_next = tl.load(gate_at, mask=v_real, other=0.0)
                c_next = tl.load(b_at + K, mask=k_real, other=0.0)
                state = tl.load(state_at, mask=real, other=0.0)
            else:
                total = tl.zeros((1, CHANNELS), tl.float32)
                state = tl.zeros((K_TILE, CHANNELS), tl.float32)
            for idx in range(size):
                x = x_next.to(tl.float32)
                dt = softplus(dt_next.to(tl.float32) + bias)
                b = b_next.to(tl.float32)
                follows = (idx + 1 < size).to(tl.int32)
                x_at += follows * x_stride
                dt_at += follows * dt_stride
                b_at += follows * bc_stride
                x_next = tl.load(x_at, mask=v_real, other=0.0)
                dt_next = tl.load(dt_at, mask=v_real, other=0.0)
                b_next = tl.load(b_at, mask=k_real, other=0.0)
                state = state * tl.exp2(rate * dt) + (x * dt) * b
                if OUTPUTS:
                    gate = gate_next.to(tl.float32)
                    c = c_next.to(tl.float32)
                    gate_at += follows * gate_stride
                    gate_next = tl.load(gate_at, mask=v_real, other=0.0)
                    c_next = tl.load(b_at + K, mask=k_real, other=0.0)
                    out = tl.sum(state * c, axis=0, keep_dims=True) + skip * x
                    out = out * (gate / (1 + tl.exp(-gate)))
                    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=v_real)
                    out_at += V
                else:
                    total += dt
            if not OUTPUTS:
                tl.store(state_at, state, mask=real)
                tl.store(sums_ptr + place * V + v_idx, total, mask=v_real)
        chunk += tl.num_programs(0)
        chunk_rows = tl.load(chunks_ptr + chunk * 4 + 1, mask=chunk < num_chunks, other=0)


@jit(varying=("num_rows", "num_sequences"))
def _pass_states(
    rate_ptr: tl.tensor,
    states_ptr: tl.tensor,
    chunk_states_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    saved_ptr: tl.tensor,
    wanted_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_sequences: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    FEW: tl.constexpr,
    KEPT: tl.constexpr,
    PLACE: tl.constexpr,
    LOG2_E: tl.constexpr,
    NUMBERS: tl.constexpr,
    STAGES: tl.constexpr,
    SAVES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Take some numbers of the states from the first chunk to the last of sequences with more than FEW rows,
    and write them before every chunk."""
    launch_dependents(PDL)
    number = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    v_idx = number % V
    inner = v_idx * K + number // V
    real = number < K * V
    rate = tl.load(rate_ptr + inner, mask=real, other=0.0) * LOG2_E
    wait(PDL)
    sequence = tl.program_id(0)
    start, stop, first, slot = rows_of(
        sequence, starts_ptr, context_lens_ptr, slots_ptr, num_rows, num_sequences
    )
    while start < num_rows:
        length = stop - start - (KEPT - 1)
        if stop - start > FEW:
            at = states_ptr + (slot * KEPT + tl.maximum(first - 1, 0) % KEPT) * (K * V)
            state = tl.load(at + inner, mask=real & (first > 0), other=0.0)
            if SAVES:
                wanted = tl.load(wanted_ptr + slot * 2) - first
                saved = tl.load(wanted_ptr + slot * 2 + 1).to(tl.int64)
                saved_at = saved_ptr + saved * (K * V) + inner
            place = (start // PLACE).to(tl.int64)
            for idx in tl.range(0, tl.cdiv(length, N), num_stages=STAGES):
                state_at = chunk_states_ptr + (place + idx) * (K * V) + number
                end = tl.load(state_at, mask=real, other=0.0)
                total = tl.load(sums_ptr + (place + idx) * V + v_idx, mask=real, other=0.0)
                tl.store(state_at, state, mask=real)
                state = state * tl.exp2(rate * total) + end
                if SAVES:
                    save_if(wanted == tl.minimum(idx * N + N, length), saved_at, state, real)
            after = states_ptr + (slot * KEPT + (first + length - 1) % KEPT) * (K * V)
            tl.store(after + inner, state, mask=real)
        sequence += tl.num_programs(0)
        start, stop, first, slot = rows_of(
            sequence, starts_ptr, context_lens_ptr, slots_ptr, num_rows, num_sequences
        )


def tile_of(k_tile: int) -> tuple[int, int]:
    """Return how many channels a program takes row after row, and its warps, for states of so many numbers,
    a power of two."""
    if k_tile < WIDE:
        return min(CHANNELS, NUMBERS_OF_TILE // k_tile), 1
    return CHANNELS_OF_WIDE, k_tile // NUMBERS_OF_WARP


def scan(
    rows: ScanRows,
    weights: ScanWeights,
    states: RecurrentStates,
    sequences: Sequences,
    out_TV: Tensor,
    options: dict[str, Any],
) -> None:
    """Write the gated outputs of sequences that have more than `few_rows` rows in the pass, and the state
    after. The last rows, one fewer than the states that are kept, are left out."""
    assert sequences.chunks_C4 is not None
    num_rows, num_channels = rows.x_TV.shape
    state_size = states.recurrence.key_dim
    num_sequences = len(sequences.starts_R)
    num_chunks = len(sequences.chunks_C4)
    places = num_scan_places(num_rows)
    states_PKV = torch.empty(places, state_size, num_channels, dtype=torch.float32, device=out_TV.device)
    sums_PV = torch.empty(places, num_channels, dtype=torch.float32, device=out_TV.device)
    of_sequences = sequences.context_lens_R, sequences.slots_R, sequences.starts_R
    facts = {
        "K": state_size,
        "V": num_channels,
        "N": CHUNK,
        "FEW": few_rows(states.num_kept),
        "KEPT": states.num_kept,
        "PLACE": PLACE_ROWS,
        "LOG2_E": LOG2_E,
        **options,
    }

    k_tile = triton.next_power_of_2(state_size)
    channels, warps = tile_of(k_tile)

    def take_chunks(*, outputs: bool) -> None:
        tiles = triton.cdiv(num_channels, channels)
        _take_chunks[(min(num_chunks, num_rows // CHUNK + MORE_CHUNKS), tiles)](
            *rows,
            weights.decay_rate_VK,
            weights.dt_bias_V,
            weights.skip_V,
            states_PKV,
            sums_PV,
            *of_sequences,
            sequences.chunks_C4,
            out_TV,
            num_rows,
            num_sequences,
            num_chunks,
            *(each.stride(0) for each in rows),
            K_TILE=k_tile,
            CHANNELS=channels,
            OUTPUTS=outputs,
            num_warps=warps,
            **facts,
        )

    take_chunks(outputs=False)
    parts = triton.cdiv(state_size * num_channels, NUMBERS)
    _pass_states[(sequences_at_once(num_sequences, parts), parts)](
        weights.decay_rate_VK,
        states.heads,
        states_PKV,
        sums_PV,
        *states.saved_heads,
        *of_sequences,
        num_rows,
        num_sequences,
        NUMBERS=NUMBERS,
        STAGES=PASS_STAGES,
        SAVES=states.saving is not None,
        num_warps=PASS_WARPS,
        **facts,
    )
    take_chunks(outputs=True)
