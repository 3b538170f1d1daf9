"""A Mamba-2 mixer between its linears: launches for the convolution and the gates of heads, for the
recurrence of each sequence, and for the gated norm (`outputs.py`).

Rows of decode, and a few of a prompt, go one after the other (`recurrence/steps.py`), so that the bits of a
row do not depend on how many rows of its sequence a step has. Longer parts of prompts go in chunks
(`chunks.py`) where the model has 16 bits.

Shapes: T rows, F channels of the convolution (C, B and x) and after them Z = H V of the gate and H of dt, H
heads, G groups, K state size, V dimension of a head, W positions of the convolution, M inputs of a slot.
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
from compress.kernels.mamba2 import chunks, outputs
from compress.kernels.operands.recurrent_states import MambaWeights, RecurrentStates, Sequences
from compress.kernels.problem import Problem
from compress.kernels.recurrence import chunking, steps
from compress.kernels.recurrence.inputs import convolved
from compress.kernels.select import Kernel, register
from compress.models.limits import MAX_SIZE

MAX_HEAD = 256
CHANNELS = 256
CONV_WARPS = 2
"""Channels of a program of the convolution, and its warps."""
SHORT_ROWS = 128
PROMPT_ROWS = 16
PROMPT_WARPS = 8
"""Rows and warps of a program of the convolution in prompts of more than `SHORT_ROWS` rows in all, whose bits
may depend on their company."""


@jit(varying=("row_stride",))
def _convolve(
    x_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    past_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    of_row_ptr: tl.tensor,
    decay_rate_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_sequences: tl.tensor,
    row_stride: tl.tensor,
    dt_factor: tl.tensor,
    H: tl.constexpr,
    F: tl.constexpr,
    Z: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    BIAS: tl.constexpr,
    TILE: tl.constexpr,
    H_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute silu of the convolution for some rows and channels. The first programs of rows also compute
    the gates of all heads: the log of what a state keeps, and the factor of what is added to it."""
    launch_dependents(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    in_pass = row < num_rows
    in_channels = channel < F
    wait(PDL)
    total = convolved(
        x_ptr,
        conv_ptr,
        past_ptr,
        context_lens_ptr,
        slots_ptr,
        starts_ptr,
        of_row_ptr,
        row,
        channel,
        in_pass,
        in_channels,
        num_rows,
        num_sequences,
        row_stride,
        F,
        W,
        M,
    )
    if BIAS:
        total += tl.load(bias_ptr + channel, mask=in_channels, other=0.0).to(tl.float32)
    rounded = total.to(x_ptr.dtype.element_ty).to(tl.float32)
    mixed = (rounded / (1 + tl.exp(-rounded))).to(x_ptr.dtype.element_ty)
    tl.store(mixed_ptr + row.to(tl.int64) * F + channel, mixed, mask=in_pass & in_channels)
    if tl.program_id(1) == 0:
        head = tl.arange(0, H_TILE)[None, :]
        real = in_pass & (head < H)
        dt = tl.load(x_ptr + row.to(tl.int64) * row_stride + F + Z + head, mask=real, other=0.0)
        dt = dt.to(tl.float32) * dt_factor + tl.load(dt_bias_ptr + head, mask=head < H, other=0.0)
        # log(1 + e), whose e is little where heads change slowly: divided by what 1 + e has lost of it.
        small = tl.exp(tl.minimum(dt, 20.0))
        above = 1 + small
        lost = tl.where(above == 1, 1.0, small / tl.where(above == 1, 1.0, above - 1))
        softplus = tl.where(above == 1, small, tl.log(above) * lost)
        softplus = tl.where(dt > 20.0, dt, softplus)
        gate_at = gates_ptr + row.to(tl.int64) * (2 * H) + head
        rate = tl.load(decay_rate_ptr + head, mask=head < H, other=0.0)
        tl.store(gate_at, rate * softplus, mask=real)
        tl.store(gate_at + H, softplus, mask=real)


def mamba2(rows_TF: Tensor, weights: MambaWeights, states: RecurrentStates, sequences: Sequences) -> Tensor:
    """Return the gated and normed outputs [T, Z], and write the slots of the sequences (`select.py`)."""
    mamba = states.recurrence
    num_rows = len(rows_TF)
    num_sequences = len(sequences.starts_R)
    device = rows_TF.device
    mixed_TF = torch.empty(num_rows, mamba.num_channels, dtype=rows_TF.dtype, device=device)
    gates_TH = torch.empty(num_rows, 2 * mamba.num_heads, dtype=torch.float32, device=device)
    found_TZ = torch.empty(num_rows, mamba.value_size, dtype=torch.float32, device=device)
    sizes = {
        "F": mamba.num_channels,
        "Z": mamba.value_size,
        "W": mamba.kernel_size,
        "M": states.inputs.shape[1],
    }
    is_prompt = sequences.chunks_C4 is not None
    of_sequences = sequences.context_lens_R, sequences.slots_R, sequences.starts_R
    counts = num_rows, num_sequences, rows_TF.stride(0)
    options = pdl_options(device)
    is_long = is_prompt and num_rows > chunking.FEW_ROWS
    by_chunks = is_long and rows_TF.dtype != torch.float32 and chunks.fit(mamba.key_dim, device)
    rows, warps = (PROMPT_ROWS, PROMPT_WARPS) if is_prompt and num_rows > SHORT_ROWS else (1, CONV_WARPS)
    _convolve[(triton.cdiv(num_rows, rows), triton.cdiv(mamba.num_channels, CHANNELS))](
        rows_TF,
        weights.conv_FW,
        weights.conv_FW if weights.conv_bias_F is None else weights.conv_bias_F,
        states.inputs,
        *of_sequences,
        sequences.of_row_T,
        weights.decay_rate_H,
        weights.dt_bias_H,
        mixed_TF,
        gates_TH,
        *counts,
        weights.dt_factor,
        H=mamba.num_heads,
        BIAS=weights.conv_bias_F is not None,
        TILE=CHANNELS,
        H_TILE=triton.next_power_of_2(mamba.num_heads),
        ROWS=rows,
        num_warps=warps,
        **sizes,
        **options,
    )
    recurrent = mixed_TF, gates_TH, states, sequences, found_TZ, options
    if by_chunks:
        chunks.recur(*recurrent)
    few = chunking.few_rows(states.num_kept) if by_chunks else MAX_SIZE
    steps.recur(*recurrent, few_rows=few, replaces=False)
    return outputs.norm_and_keep(rows_TF, mixed_TF, found_TZ, weights, states, sequences, options)


def _supports(problem: Problem) -> str | None:
    if problem.n > MAX_HEAD or problem.k > MAX_HEAD:
        return f"states of {problem.n} and heads of {problem.k} dimensions, above {MAX_HEAD}."
    return triton_refusal(problem)


register(Kernel("mamba2", "fused", min_sm=80, priority=10, supports=_supports, fn=mamba2, takes_lists=True))
