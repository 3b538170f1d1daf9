"""The recurrence of a Mamba-1 mixer over the states of sequences, in Triton.

Rows of decode, and a few of a prompt, go one after the other: one program has the states of some channels in
registers, so that the bits of a row do not depend on how many rows of its sequence a pass has, nor on other
sequences. Longer parts of prompts go in chunks (`chunks.py`).

Shapes: T rows, V channels, K numbers of the state of a channel, N states of a slot.
"""

import torch
from torch import Tensor

from compress.kernels.compilers.triton import (
    jit,
    launch_dependents,
    pdl_options,
    tl,
    triton,
    triton_refusal,
    wait,
)
from compress.kernels.operands.recurrent_states import RecurrentStates, Sequences
from compress.kernels.operands.selective import ScanRows, ScanWeights
from compress.kernels.problem import Problem
from compress.kernels.recurrence import chunking
from compress.kernels.recurrence.rows import rows_of
from compress.kernels.select import Kernel, register
from compress.kernels.selective_scan import chunks
from compress.kernels.selective_scan.rows import softplus
from compress.models.limits import MAX_SIZE

CHANNELS = 16
WARPS = 1
"""Channels of one program, and its warps."""
MAX_STATE = 256


@jit(varying=("x_stride", "gate_stride", "dt_stride", "bc_stride"))
def _scan(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    bc_ptr: tl.tensor,
    rate_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    skip_ptr: tl.tensor,
    states_ptr: tl.tensor,
    saved_ptr: tl.tensor,
    wanted_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_sequences: tl.tensor,
    x_stride: tl.tensor,
    gate_stride: tl.tensor,
    dt_stride: tl.tensor,
    bc_stride: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    K_TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
    FEW: tl.constexpr,
    SAVES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Take the states of some channels from the first row of sequences to the last; of a sequence with more
    than FEW rows, through the last N - 1."""
    launch_dependents(PDL)
    k_idx = tl.arange(0, K_TILE)[None, :]
    v_idx = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[:, None]
    k_real = k_idx < K
    v_real = v_idx < V
    real = k_real & v_real
    inner = v_idx * K + k_idx
    rate = tl.load(rate_ptr + inner, mask=real, other=0.0)
    bias = tl.load(bias_ptr + v_idx, mask=v_real, other=0.0)
    skip = tl.load(skip_ptr + v_idx, mask=v_real, other=0.0)
    wait(PDL)
    sequence = tl.program_id(0)
    start, stop, position, slot = rows_of(
        sequence, starts_ptr, context_lens_ptr, slots_ptr, num_rows, num_sequences
    )
    while start < num_rows:
        begin = tl.where(stop - start > FEW, stop - (N - 1), start)
        length = stop - begin
        first = position + (begin - start)
        if SAVES:
            wanted = tl.load(wanted_ptr + slot * 2) - first - 1
            saved_at = saved_ptr + tl.load(wanted_ptr + slot * 2 + 1).to(tl.int64) * (V * K) + inner
        place = slot * N + tl.maximum(first - 1, 0) % N
        state = tl.load(
            states_ptr + place * (V * K) + inner, mask=real & (length > 0) & (first > 0), other=0.0
        )
        for idx in range(length):
            row = (begin + idx).to(tl.int64)
            x = tl.load(x_ptr + row * x_stride + v_idx, mask=v_real, other=0.0).to(tl.float32)
            gate = tl.load(gate_ptr + row * gate_stride + v_idx, mask=v_real, other=0.0).to(tl.float32)
            dt = tl.load(dt_ptr + row * dt_stride + v_idx, mask=v_real, other=0.0).to(tl.float32)
            b_at = bc_ptr + row * bc_stride + k_idx
            b = tl.load(b_at, mask=k_real, other=0.0).to(tl.float32)
            c = tl.load(b_at + K, mask=k_real, other=0.0).to(tl.float32)
            dt = softplus(dt + bias)
            state = state * tl.exp(rate * dt) + (x * dt) * b
            out = tl.sum(state * c, axis=1, keep_dims=True) + skip * x
            out = out * (gate / (1 + tl.exp(-gate)))
            tl.store(out_ptr + row * V + v_idx, out.to(out_ptr.dtype.element_ty), mask=v_real)
            if idx >= length - N:
                kept = slot * N + tl.maximum(first + idx, 0) % N
                tl.store(states_ptr + kept * (V * K) + inner, state, mask=real & (first + idx >= 0))
            if SAVES:
                tl.store(saved_at, state, mask=real & (idx == wanted))
        sequence += tl.num_programs(0)
        start, stop, position, slot = rows_of(
            sequence, starts_ptr, context_lens_ptr, slots_ptr, num_rows, num_sequences
        )


def selective_scan(
    x_TV: Tensor,
    gate_TV: Tensor,
    dt_TV: Tensor,
    bc_TK: Tensor,
    weights: ScanWeights,
    states: RecurrentStates,
    sequences: Sequences,
) -> Tensor:
    """Return the gated outputs [T, V], and write the states of the sequences (`select.py`)."""
    num_rows, num_channels = x_TV.shape
    state_size = states.recurrence.key_dim
    out_TV = torch.empty(num_rows, num_channels, dtype=x_TV.dtype, device=x_TV.device)
    num_sequences = len(sequences.starts_R)
    is_prompt = sequences.chunks_C4 is not None
    tiles = triton.cdiv(num_channels, CHANNELS)
    at_once = chunking.sequences_at_once(num_sequences, tiles) if is_prompt else num_sequences
    operands = x_TV, gate_TV, dt_TV, bc_TK
    assert all(each.stride(1) == 1 for each in operands)
    assert weights.decay_rate_VK.is_contiguous()
    options = pdl_options(x_TV.device)
    in_chunks = is_prompt and num_rows > chunking.FEW_ROWS
    if in_chunks:
        chunks.scan(ScanRows(*operands), weights, states, sequences, out_TV, options)
    _scan[(at_once, tiles)](
        *operands,
        weights.decay_rate_VK,
        weights.dt_bias_V,
        weights.skip_V,
        states.heads,
        *states.saved_heads,
        sequences.context_lens_R,
        sequences.slots_R,
        sequences.starts_R,
        out_TV,
        num_rows,
        num_sequences,
        *(each.stride(0) for each in operands),
        K=state_size,
        V=num_channels,
        N=states.num_kept,
        K_TILE=triton.next_power_of_2(state_size),
        CHANNELS=CHANNELS,
        FEW=chunking.few_rows(states.num_kept) if in_chunks else MAX_SIZE,
        SAVES=is_prompt and states.saving is not None,
        num_warps=WARPS,
        **options,
    )
    return out_TV


def _supports(problem: Problem) -> str | None:
    if problem.n > MAX_STATE:
        return f"a channel's state of {problem.n} numbers is above {MAX_STATE}, which registers hold"
    return triton_refusal(problem)


register(
    Kernel(
        "selective_scan",
        "fused",
        min_sm=80,
        priority=10,
        supports=_supports,
        fn=selective_scan,
        takes_lists=True,
    )
)
