"""The recurrence of a gated delta net over the rows of prompts, in chunks whose updates are solved for at
once (the WY form of arXiv 2406.06484 with the decays of arXiv 2412.06464), so that the work is products on
tensor cores: what `models/delta_net.py` does in torch.

The first launch prepares every chunk of every head, none of which waits for another; the second takes some
columns of the state of a head from chunk to chunk.

Shapes: T rows, F channels of the convolution, H value heads, G key heads, K key dimension, V value dimension,
N rows of a chunk, C chunks.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, tl, triton, wait
from compress.kernels.operands.delta_states import DeltaStates, Sequences
from compress.models.delta_net import CHUNK, DeltaNet

FEW_ROWS = 32
"""A sequence with at most so many rows in a pass goes row by row instead."""
MAX_KEY = 128
BOX = 64
"""Columns that one product of the first launch has."""
COLUMNS = 32
"""Columns of a state that one program of the second launch has."""
SOLVE_WARPS = 4
SOLVE_STAGES = 2
WARPS = 4
STAGES = 2


@jit()
def _solve(
    mixed_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    own_ptr: tl.tensor,
    of_state_ptr: tl.tensor,
    scores_ptr: tl.tensor,
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
    K_TILE: tl.constexpr,
    K_BOX: tl.constexpr,
    V_BOX: tl.constexpr,
    SOLVED: tl.constexpr,
    MULTIPLIED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute what the updates of a chunk are without a state, what the state before the chunk takes from
    them, and the scores of its queries; all by row and head."""
    launch_dependents(PDL)
    head = tl.program_id(1)
    chunk_at = chunks_ptr + tl.program_id(0) * 4
    idx = tl.arange(0, N)
    k_idx = tl.arange(0, K_TILE)
    wait(PDL)
    first_row = tl.load(chunk_at)
    size = tl.load(chunk_at + 1)
    sequence = tl.load(chunk_at + 3)
    start = tl.load(starts_ptr + sequence)
    stop = tl.load(starts_ptr + sequence + 1, mask=sequence + 1 < num_sequences, other=num_rows)
    if (size > 0) & (stop - start > FEW):
        dtype = of_state_ptr.dtype.element_ty
        rows = (first_row + idx).to(tl.int64)
        real = idx < size
        key_at = mixed_ptr + rows[:, None] * F + head // (H // G) * K + k_idx[None, :]
        key_real = real[:, None] & (k_idx[None, :] < K)
        gate_at = gates_ptr + rows * (2 * H) + head
        q = tl.load(key_at, mask=key_real, other=0.0).to(dtype)
        k = tl.load(key_at + G * K, mask=key_real, other=0.0).to(dtype)
        total = tl.cumsum(tl.load(gate_at, mask=real, other=0.0), axis=0)
        beta = tl.load(gate_at + H, mask=real, other=0.0)
        row = idx[:, None]
        column = idx[None, :]
        kept = tl.exp(tl.where(row >= column, total[:, None] - total[None, :], float("-inf")))
        scores = tl.dot(q, tl.trans(k), input_precision=MULTIPLIED) * kept
        scores_at = scores_ptr + (rows[:, None] * H + head) * N + column
        tl.store(scores_at, scores.to(dtype), mask=real[:, None])
        alike = tl.dot(k, tl.trans(k), input_precision=MULTIPLIED) * kept
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
                right = tl.dot(between, inverse, input_precision=SOLVED)
                inverse = inverse - tl.dot(inverse, right, input_precision=SOLVED)
        inverse = inverse.to(dtype)
        for begin in tl.static_range(0, K, K_BOX):
            d = begin + tl.arange(0, K_BOX)[None, :]
            box_real = real[:, None] & (d < K)
            at = mixed_ptr + rows[:, None] * F + (G + head // (H // G)) * K + d
            box = tl.load(at, mask=box_real, other=0.0) * (beta * tl.exp(total))[:, None]
            solved = tl.dot(inverse, box.to(dtype), input_precision=MULTIPLIED)
            at = of_state_ptr + (rows[:, None] * H + head) * K + d
            tl.store(at, solved.to(dtype), mask=box_real)
        for begin in tl.static_range(0, V, V_BOX):
            d = begin + tl.arange(0, V_BOX)[None, :]
            box_real = real[:, None] & (d < V)
            at = mixed_ptr + rows[:, None] * F + 2 * G * K + head * V + d
            box = tl.load(at, mask=box_real, other=0.0) * beta[:, None]
            solved = tl.dot(inverse, box.to(dtype), input_precision=MULTIPLIED)
            tl.store(own_ptr + (rows[:, None] * H + head) * V + d, solved, mask=box_real)


@jit()
def _advance(
    mixed_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    own_ptr: tl.tensor,
    of_state_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    states_ptr: tl.tensor,
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
    FEW: tl.constexpr,
    KEPT: tl.constexpr,
    K_TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MULTIPLIED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Take some columns of the state of one head from the first chunk of a sequence to its last."""
    launch_dependents(PDL)
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    idx = tl.arange(0, N)
    k_idx = tl.arange(0, K_TILE)
    v_idx = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    wait(PDL)
    start = tl.load(starts_ptr + sequence)
    stop = tl.load(starts_ptr + sequence + 1, mask=sequence + 1 < num_sequences, other=num_rows)
    length = stop - start
    if length > FEW:
        dtype = of_state_ptr.dtype.element_ty
        last = tl.load(context_lens_ptr + sequence) - 1
        first = last + 1 - length
        slot = tl.load(slots_ptr + sequence).to(tl.int64) * KEPT
        inner = head * K * V + v_idx * K + k_idx[:, None]
        state_real = (k_idx[:, None] < K) & (v_idx < V)
        place = slot + tl.maximum(first - 1, 0) % KEPT
        state_at = states_ptr + place * (H * K * V) + inner
        state = tl.load(state_at, mask=state_real & (first > 0), other=0.0)
        for begin in range(0, length, N):
            real = idx < length - begin
            rows = (start + begin + idx).to(tl.int64)
            key_real = real[:, None] & (k_idx[None, :] < K)
            key_at = mixed_ptr + rows[:, None] * F + head // (H // G) * K + k_idx[None, :]
            of_state_at = of_state_ptr + (rows[:, None] * H + head) * K + k_idx[None, :]
            own_at = own_ptr + (rows[:, None] * H + head) * V + v_idx
            scores_at = scores_ptr + (rows[:, None] * H + head) * N + idx[None, :]
            of_state = tl.load(of_state_at, mask=key_real, other=0.0)
            own = tl.load(own_at, mask=real[:, None] & (v_idx < V), other=0.0)
            scores = tl.load(scores_at, mask=real[:, None], other=0.0)
            q = tl.load(key_at, mask=key_real, other=0.0)
            k = tl.load(key_at + G * K, mask=key_real, other=0.0)
            decay = tl.load(gates_ptr + rows * (2 * H) + head, mask=real, other=0.0)
            total = tl.cumsum(decay, axis=0)
            whole = tl.sum(decay, axis=0)
            before = state.to(dtype)
            update = own - tl.dot(of_state, before, input_precision=MULTIPLIED)
            out = tl.dot((q * tl.exp(total)[:, None]).to(dtype), before, input_precision=MULTIPLIED)
            update = update.to(dtype)
            out += tl.dot(scores, update, input_precision=MULTIPLIED)
            to_end = (k * tl.exp(tl.minimum(whole - total, 0.0))[:, None]).to(dtype)
            state = state * tl.exp(whole)
            state += tl.dot(tl.trans(to_end), update, input_precision=MULTIPLIED)
            out_at = out_ptr + rows[:, None] * (H * V) + head * V + v_idx
            tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=real[:, None] & (v_idx < V))
        place = slot + last % KEPT
        tl.store(states_ptr + place * (H * K * V) + inner, state, mask=state_real)


def fit(delta: DeltaNet) -> bool:
    """Return whether the products of a head fit a multiprocessor."""
    return delta.key_dim <= MAX_KEY


@dataclass(frozen=True)
class Prepared:
    """What the first launch leaves for the second: the updates of the rows without a state [T, H, V], what a
    state takes from them [T, H, K], and the scores of queries within their chunk [T, H, N]."""

    own: Tensor
    of_state: Tensor
    scores: Tensor


def recur(
    mixed_TF: Tensor,
    gates_TH: Tensor,
    states: DeltaStates,
    sequences: Sequences,
    out_TZ: Tensor,
    options: dict[str, Any],
) -> None:
    """Write the outputs of sequences with more than `FEW_ROWS` rows in the pass, and the states after them.

    `mixed_TF` are queries, keys and values, `gates_TH` the log of what a state keeps and the factor of
    updates [T, 2 H], all float32. Products are of numbers in the dtype of the outputs, float32 in TF32's
    precision at least; sums and states are float32.
    """
    assert sequences.chunks_C4 is not None
    delta = states.delta
    device = mixed_TF.device
    dtype = out_TZ.dtype
    num_rows, num_heads = len(mixed_TF), delta.num_heads
    per_head = num_rows, num_heads
    prepared = Prepared(
        torch.empty(*per_head, delta.value_dim, dtype=torch.float32, device=device),
        torch.empty(*per_head, delta.key_dim, dtype=dtype, device=device),
        torch.empty(*per_head, CHUNK, dtype=dtype, device=device),
    )
    counts = num_rows, len(sequences.starts_R)
    is_wide = dtype == torch.float32
    k_tile = max(16, triton.next_power_of_2(delta.key_dim))
    shared = {
        "H": num_heads,
        "G": delta.num_key_heads,
        "K": delta.key_dim,
        "V": delta.value_dim,
        "F": delta.num_channels,
        "N": CHUNK,
        "FEW": FEW_ROWS,
        "K_TILE": k_tile,
        "MULTIPLIED": "ieee" if is_wide else "tf32",
        **options,
    }
    _solve[(len(sequences.chunks_C4), num_heads)](
        mixed_TF,
        gates_TH,
        sequences.starts_R,
        sequences.chunks_C4,
        prepared.own,
        prepared.of_state,
        prepared.scores,
        *counts,
        LEVELS=CHUNK.bit_length() - 1,
        K_BOX=min(BOX, k_tile),
        V_BOX=min(BOX, max(16, triton.next_power_of_2(delta.value_dim))),
        SOLVED="ieee" if is_wide else "tf32x3",
        num_warps=SOLVE_WARPS,
        num_stages=SOLVE_STAGES,
        **shared,
    )
    _advance[(len(sequences.starts_R), num_heads, triton.cdiv(delta.value_dim, COLUMNS))](
        mixed_TF,
        gates_TH,
        prepared.own,
        prepared.of_state,
        prepared.scores,
        states.heads,
        sequences.context_lens_R,
        sequences.slots_R,
        sequences.starts_R,
        out_TZ,
        *counts,
        KEPT=states.num_kept,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
        num_stages=STAGES,
        **shared,
    )
