"""A gated short convolution between its linears, in Triton: one launch in a decode step, which also keeps
the inputs of its rows; in prompts a second one keeps those of the last, when the first has read what is in
their places.

Shapes: T rows, F channels, W positions of the convolution, M inputs of a slot.
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
from compress.kernels.recurrence.rows import rows_of
from compress.kernels.select import Kernel, register

CHANNELS = 256
WARPS = 2
"""Channels that one program has in a row, and its warps."""


@jit()
def _product(
    x_ptr: tl.tensor,
    row: tl.tensor,
    channel: tl.tensor,
    real: tl.tensor,
    row_stride: tl.tensor,
    F: tl.constexpr,
) -> tl.tensor:
    """Return B x of a row, rounded to its dtype, in float32."""
    at = x_ptr + row.to(tl.int64) * row_stride + channel
    b = tl.load(at, mask=real, other=0.0).to(tl.float32)
    x = tl.load(at + 2 * F, mask=real, other=0.0).to(tl.float32)
    return (b * x).to(x_ptr.dtype.element_ty).to(tl.float32)


@jit(varying=("row_stride",))
def _mix(
    x_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    inputs_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    of_row_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_sequences: tl.tensor,
    row_stride: tl.tensor,
    F: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEEPS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute some channels of one row, and keep its inputs."""
    launch_dependents(PDL)
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < F
    wait(PDL)
    sequence = tl.load(of_row_ptr + row)
    start, _, first, slot = rows_of(
        sequence, starts_ptr, context_lens_ptr, slots_ptr, num_rows, num_sequences
    )
    slot *= M
    own = _product(x_ptr, row, channel, real, row_stride, F)
    total = tl.zeros([CHANNELS], tl.float32)
    for tap in tl.static_range(W - 1):
        source = row - (W - 1) + tap
        position = first + (source - start)
        here = _product(x_ptr, source, channel, real & (source >= start), row_stride, F)
        place = slot + tl.maximum(position, 0) % M
        is_past = real & (source < start) & (position >= 0)
        past = tl.load(inputs_ptr + place * F + channel, mask=is_past, other=0.0)
        weight = tl.load(conv_ptr + channel * W + tap, mask=real, other=0.0).to(tl.float32)
        total = total + tl.where(source >= start, here, past) * weight
    weight = tl.load(conv_ptr + channel * W + W - 1, mask=real, other=0.0).to(tl.float32)
    total = total + own * weight
    dtype = out_ptr.dtype.element_ty
    at = row.to(tl.int64) * row_stride + F + channel
    c = tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32)
    out = (c * total.to(dtype).to(tl.float32)).to(dtype)
    tl.store(out_ptr + row.to(tl.int64) * F + channel, out, mask=real)
    if KEEPS:
        place = slot + tl.maximum(first + (row - start), 0) % M
        tl.store(inputs_ptr + place * F + channel, own, mask=real & (first + (row - start) >= 0))


@jit(varying=("row_stride",))
def _keep(
    x_ptr: tl.tensor,
    inputs_ptr: tl.tensor,
    saved_ptr: tl.tensor,
    wanted_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    of_row_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_sequences: tl.tensor,
    row_stride: tl.tensor,
    F: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    CHANNELS: tl.constexpr,
    SAVES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Keep some channels of the inputs of one row, where it is among the last of its sequence or before a
    state that is saved."""
    launch_dependents(PDL)
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < F
    wait(PDL)
    sequence = tl.load(of_row_ptr + row)
    stop = tl.load(starts_ptr + sequence + 1, mask=sequence + 1 < num_sequences, other=num_rows)
    position = tl.load(context_lens_ptr + sequence) - (stop - row)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    own = _product(x_ptr, row, channel, real, row_stride, F)
    place = slot * M + tl.maximum(position, 0) % M
    tl.store(inputs_ptr + place * F + channel, own, mask=real & (row >= stop - M) & (position >= 0))
    if SAVES:
        wanted = tl.load(wanted_ptr + slot * 2)
        place = tl.load(wanted_ptr + slot * 2 + 1).to(tl.int64) * W + tl.maximum(position, 0) % W
        saved = real & (position < wanted) & (position >= tl.maximum(wanted - (W - 1), 0))
        tl.store(saved_ptr + place * F + channel, own, mask=saved)


def short_conv(rows_TF: Tensor, conv_FW: Tensor, states: RecurrentStates, sequences: Sequences) -> Tensor:
    """Return the outputs [T, F], and write the slots of the sequences (`select.py`)."""
    widths = states.recurrence
    num_rows = len(rows_TF)
    out_TF = torch.empty(num_rows, widths.num_channels, dtype=rows_TF.dtype, device=rows_TF.device)
    is_prompt = sequences.chunks_C4 is not None
    of_sequences = (sequences.context_lens_R, sequences.slots_R, sequences.starts_R, sequences.of_row_T)
    counts = num_rows, len(sequences.starts_R), rows_TF.stride(0)
    grid = num_rows, triton.cdiv(widths.num_channels, CHANNELS)
    shared = {
        "F": widths.num_channels,
        "W": widths.kernel_size,
        "M": states.inputs.shape[1],
        "CHANNELS": CHANNELS,
        "num_warps": WARPS,
        **pdl_options(rows_TF.device),
    }
    _mix[grid](rows_TF, conv_FW, states.inputs, *of_sequences, out_TF, *counts, KEEPS=not is_prompt, **shared)
    if is_prompt:
        saves = states.saving is not None
        _keep[grid](
            rows_TF, states.inputs, *states.saved_inputs, *of_sequences, *counts, SAVES=saves, **shared
        )
    return out_TF


register(
    Kernel(
        "short_conv",
        "fused",
        min_sm=80,
        priority=10,
        supports=triton_refusal,
        fn=short_conv,
        takes_lists=True,
    )
)
