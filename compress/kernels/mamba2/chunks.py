"""The recurrence of a Mamba-2 mixer over the rows of prompts, in chunks whose rows attend to those before
them at once (arXiv 2405.21060, section 6), so that the work is products on tensor cores: what
`models/mamba2.py` does in torch.

The first launch takes the states of sequences from chunk to chunk and writes the one before each
(`states.py`). The second computes the outputs of all chunks, none of which waits for another: what queries
find in the state before the chunk, and in the keys of its own rows. Queries and keys (C and B) belong to many
heads, so their products are computed once for some heads of a group. A sequence of one chunk needs no first
launch: the second also computes the state after it, by the same arithmetic.

So the bits of a row do not depend on where a sequence is cut, if it is after a multiple of `LONG_CHUNK` rows,
nor on its company. For models in float32 products as exact as theirs take as long as the rows one after the
other (3.3 ms for 4096 rows of 128 heads on an H200, 2.9 ms in three products of TF32 at best).

Shapes: T rows, F channels of the convolution, H heads, G groups, K state size, V dimension of a head, N rows
of a chunk.
"""

import math
from typing import Any

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, tl, triton, wait
from compress.kernels.mamba2.states import (
    advanced,
    in_pairs,
    pass_states,
    save,
    save_within,
    times_wide,
    totals,
    wide_times,
)
from compress.kernels.operands.gpu import gpu_of
from compress.kernels.operands.recurrent_states import LONG_CHUNK, RecurrentStates, Sequences
from compress.kernels.recurrence.chunking import few_rows
from compress.kernels.recurrence.rows import rows_of

COLUMNS = 32
LEAST_COLUMNS = 16
MOST_VALUES = 80
"""Columns of one product; those where the dimensions of a head are no multiple of so many; and the most
columns of a program, whose states have room in a multiprocessor of sm_80."""
HEADS = 4
WARPS = 4
STAGES = 2
"""The most heads that one program has, its warps and its stages."""
ANYWHERE = 128
SHARED_BYTES = 160 * 1024
"""The size of a state whose products fit the shared memory of any GPU, and the bytes of shared memory that
are enough for every size: sm_80 and sm_90 have more, sm_86 and sm_89 less."""
LEAST_PROGRAMS = 256
"""Programs have fewer heads, and then one product, rather than that a pass has fewer of them."""
MORE_CHUNKS = 8
"""Programs more than whole chunks, for the last ones of sequences; where there are more, they take turns."""


@jit(varying=("num_rows", "num_sequences", "num_chunks"))
def _find(
    mixed_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    states_ptr: tl.tensor,
    before_ptr: tl.tensor,
    saved_ptr: tl.tensor,
    wanted_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_sequences: tl.tensor,
    num_chunks: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    N: tl.constexpr,
    FEW: tl.constexpr,
    KEPT: tl.constexpr,
    K_TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    TILES: tl.constexpr,
    PART: tl.constexpr,
    SAVES: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute some outputs of some heads of a group in chunks of sequences with more than FEW rows, but for
    the last KEPT - 1 rows, and the state after sequences of one chunk."""
    launch_dependents(PDL)
    first_head = tl.program_id(1) * HEADS
    first_v = tl.program_id(2) * TILES * COLUMNS
    idx = tl.arange(0, N)
    row = idx[:, None]
    column = idx[None, :]
    k_idx = tl.arange(0, K_TILE)[None, :]
    v_row = tl.arange(0, COLUMNS)[:, None]
    v_column = tl.arange(0, COLUMNS)[None, :]
    q_inner = first_head // (H // G) * K + row * F + k_idx
    wait(PDL)
    chunk = tl.program_id(0)
    chunk_rows = tl.load(chunks_ptr + chunk * 4 + 1)
    while chunk_rows > 0:
        first_row = tl.load(chunks_ptr + chunk * 4)
        sequence = tl.load(chunks_ptr + chunk * 4 + 3)
        start, stop, first, slot = rows_of(
            sequence, starts_ptr, context_lens_ptr, slots_ptr, num_rows, num_sequences
        )
        length = stop - start - (KEPT - 1)
        size = tl.minimum(chunk_rows, start + length - first_row)
        if (stop - start > FEW) & (size > 0):
            is_alone = length <= N
            place = start // N + tl.minimum(sequence, start // N) + (first_row - start) // N
            state_at = tl.where(
                is_alone,
                states_ptr + (slot * KEPT + tl.maximum(first - 1, 0) % KEPT) * (H * K * V),
                before_ptr + place.to(tl.int64) * (H * K * V),
            )
            has_state = (first > 0) | (length > N)
            after_at = states_ptr + (slot * KEPT + (first + length - 1) % KEPT) * (H * K * V)
            mixed_at = mixed_ptr + first_row.to(tl.int64) * F
            gate_at = gates_ptr + first_row.to(tl.int64) * (2 * H)
            out_at = out_ptr + first_row.to(tl.int64) * (H * V)
            if SAVES:
                wanted = tl.load(wanted_ptr + slot * 2) - first
                saved_at = saved_ptr + tl.load(wanted_ptr + slot * 2 + 1).to(tl.int64) * (H * K * V)
            key_real = (row < size) & (k_idx < K)
            q = tl.load(mixed_at + q_inner, mask=key_real, other=0.0)
            k = tl.load(mixed_at + G * K + q_inner, mask=key_real, other=0.0)
            if q.dtype == tl.bfloat16 and not PAIRS:
                q = q.to(tl.float32)
                k = k.to(tl.float32)
            alike = tl.dot(q, tl.trans(k), input_precision="tf32")
            for head in range(first_head, first_head + HEADS):
                total, whole = totals(gate_at + head + idx * (2 * H), idx < size)
                factor = tl.load(gate_at + H + head + idx * (2 * H), mask=idx < size, other=0.0)
                kept = tl.exp(tl.where(row >= column, total[:, None] - total[None, :], float("-inf")))
                scores = alike * (kept * factor[None, :])
                since = tl.exp(total)[:, None]
                for tile in tl.static_range(TILES):
                    v_idx = first_v + tile * COLUMNS + v_row
                    inner = head * K * V + v_idx * K + k_idx
                    real = (v_idx < V) & (k_idx < K) & has_state
                    state = tl.load(state_at + inner, mask=real, other=0.0)
                    v_inner = 2 * G * K + head * V + column * F + v_idx
                    v = tl.load(mixed_at + v_inner, mask=(column < size) & (v_idx < V), other=0.0)
                    out = wide_times(scores, tl.trans(v), times_wide(q, state, PAIRS) * since, PAIRS)
                    out_idx = first_v + tile * COLUMNS + v_column
                    out_real = (row < size) & (out_idx < V)
                    tl.store(out_at + row * (H * V) + head * V + out_idx, out, mask=out_real)
            if is_alone:
                PARTS: tl.constexpr = TILES * COLUMNS // PART
                for part in range(HEADS * PARTS):
                    head = first_head + part // PARTS
                    v_idx = first_v + part % PARTS * PART + tl.arange(0, PART)[:, None]
                    inner = head * K * V + v_idx * K + k_idx
                    real = (v_idx < V) & (k_idx < K)
                    state = tl.load(state_at + inner, mask=real & has_state, other=0.0)
                    v_inner = 2 * G * K + head * V + column * F + v_idx
                    v = tl.load(mixed_at + v_inner, mask=(column < size) & (v_idx < V), other=0.0)
                    total, whole = totals(gate_at + head + idx * (2 * H), idx < size)
                    factor = tl.load(gate_at + H + head + idx * (2 * H), mask=idx < size, other=0.0)
                    update = v.to(tl.float32) * factor[None, :]
                    if SAVES:
                        save_within(saved_at + inner, real, state, k, update, total, wanted, size, idx, PAIRS)
                    state = advanced(state, k, update, total, whole, PAIRS)
                    tl.store(after_at + inner, state, mask=real)
                    if SAVES:
                        save(saved_at + inner, real, state, wanted == size)
        chunk += tl.num_programs(0)
        chunk_rows = tl.load(chunks_ptr + chunk * 4 + 1, mask=chunk < num_chunks, other=0)


def fit(state_size: int, device: torch.device) -> bool:
    """Return whether the products of a head fit a multiprocessor."""
    return state_size <= ANYWHERE or device.type != "cuda" or gpu_of(device).shared_bytes >= SHARED_BYTES


def recur(
    mixed_TF: Tensor,
    gates_TH: Tensor,
    states: RecurrentStates,
    sequences: Sequences,
    out_TZ: Tensor,
    options: dict[str, Any],
) -> None:
    """Write the float32 outputs of sequences that have more than `few_rows` rows in the pass, and the state
    after. The last rows, one fewer than the states that are kept, are left out. Operands are those of
    `recurrence/steps.py`, queries, keys and values in 16 bits."""
    assert sequences.long_chunks_C4 is not None
    before_PHVK = pass_states(mixed_TF, gates_TH, states, sequences)
    mamba = states.recurrence
    num_rows = len(mixed_TF)
    num_chunks = len(sequences.long_chunks_C4)
    columns = COLUMNS if mamba.value_dim % COLUMNS == 0 else LEAST_COLUMNS
    heads, tiles = _work(mamba.num_heads, mamba.num_key_heads, mamba.value_dim, columns, num_rows)
    programs = (
        min(num_chunks, num_rows // LONG_CHUNK + MORE_CHUNKS),
        mamba.num_heads // heads,
        triton.cdiv(mamba.value_dim, tiles * columns),
    )
    _find[programs](
        mixed_TF,
        gates_TH,
        states.heads,
        before_PHVK,
        *states.saved_heads,
        sequences.context_lens_R,
        sequences.slots_R,
        sequences.starts_R,
        sequences.long_chunks_C4,
        out_TZ,
        num_rows,
        len(sequences.starts_R),
        num_chunks,
        H=mamba.num_heads,
        G=mamba.num_key_heads,
        K=mamba.key_dim,
        V=mamba.value_dim,
        F=mamba.num_channels,
        N=LONG_CHUNK,
        FEW=few_rows(states.num_kept),
        KEPT=states.num_kept,
        K_TILE=max(16, triton.next_power_of_2(mamba.key_dim)),
        COLUMNS=columns,
        HEADS=heads,
        TILES=tiles,
        PART=LEAST_COLUMNS,
        SAVES=states.saving is not None,
        PAIRS=in_pairs(mamba.key_dim, mixed_TF.dtype),
        num_warps=WARPS,
        num_stages=STAGES,
        **options,
    )


def _work(num_heads: int, num_groups: int, value_dim: int, columns: int, num_rows: int) -> tuple[int, int]:
    """Return the heads of a program, all of one group, and the products of each. Bits depend on neither."""
    chunks = max(1, num_rows // LONG_CHUNK)
    heads = math.gcd(HEADS, num_heads // num_groups)
    while heads > 1 and chunks * num_heads // heads < LEAST_PROGRAMS:
        heads //= 2
    if chunks * num_heads < LEAST_PROGRAMS:
        return heads, 1
    return heads, min(MOST_VALUES // columns, triton.cdiv(value_dim, columns))
