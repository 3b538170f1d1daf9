"""A short convolution with a residual in Triton (`models/residual_conv.py`): one launch in a decode step,
which also keeps the inputs of its rows; in prompts a second one keeps those of the last, when the first has
read what is in their places.

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


@jit(varying=("row_stride", "first_channel"))
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
    first_channel: tl.tensor,
    F: tl.constexpr,
    OF_STATE: tl.constexpr,
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
    own = tl.load(x_ptr + row.to(tl.int64) * row_stride + channel, mask=real, other=0.0).to(tl.float32)
    total = tl.zeros([CHANNELS], tl.float32)
    for tap in tl.static_range(W - 1):
        source = row - (W - 1) + tap
        position = first + (source - start)
        is_here = real & (source >= start)
        here_at = x_ptr + source.to(tl.int64) * row_stride + channel
        here = tl.load(here_at, mask=is_here, other=0.0).to(tl.float32)
        place = slot + tl.maximum(position, 0) % M
        is_past = real & (source < start) & (position >= 0)
        past = tl.load(inputs_ptr + place * OF_STATE + first_channel + channel, mask=is_past, other=0.0)
        weight = tl.load(conv_ptr + channel * W + tap, mask=real, other=0.0)
        total = total + tl.where(source >= start, here, past) * weight
    weight = tl.load(conv_ptr + channel * W + W - 1, mask=real, other=0.0)
    total = total + own * weight
    out = (own + total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row.to(tl.int64) * F + channel, out, mask=real)
    if KEEPS:
        place = slot + tl.maximum(first + (row - start), 0) % M
        kept_at = inputs_ptr + place * OF_STATE + first_channel + channel
        tl.store(kept_at, own, mask=real & (first + (row - start) >= 0))


@jit(varying=("row_stride", "first_channel"))
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
    first_channel: tl.tensor,
    F: tl.constexpr,
    OF_STATE: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    CHANNELS: tl.constexpr,
    SAVES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Keep some channels of one row, where it is among the last of its sequence or before a state that is
    saved."""
    launch_dependents(PDL)
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < F
    wait(PDL)
    sequence = tl.load(of_row_ptr + row)
    stop = tl.load(starts_ptr + sequence + 1, mask=sequence + 1 < num_sequences, other=num_rows)
    position = tl.load(context_lens_ptr + sequence) - (stop - row)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    own = tl.load(x_ptr + row.to(tl.int64) * row_stride + channel, mask=real, other=0.0).to(tl.float32)
    place = slot * M + tl.maximum(position, 0) % M
    kept_at = inputs_ptr + place * OF_STATE + first_channel + channel
    tl.store(kept_at, own, mask=real & (row >= stop - M) & (position >= 0))
    if SAVES:
        wanted = tl.load(wanted_ptr + slot * 2)
        place = tl.load(wanted_ptr + slot * 2 + 1).to(tl.int64) * W + tl.maximum(position, 0) % W
        saved = real & (position < wanted) & (position >= tl.maximum(wanted - (W - 1), 0))
        tl.store(saved_ptr + place * OF_STATE + first_channel + channel, own, mask=saved)


def residual_conv(
    rows_TF: Tensor, conv_FW: Tensor, states: RecurrentStates, sequences: Sequences, *, first_channel: int
) -> Tensor:
    """Return the rows with their convolution added [T, F], and write the slots of the sequences
    (`select.py`)."""
    assert rows_TF.stride(1) == 1
    assert conv_FW.dtype == torch.float32
    num_rows, size = rows_TF.shape
    out_TF = torch.empty(num_rows, size, dtype=rows_TF.dtype, device=rows_TF.device)
    is_prompt = sequences.chunks_C4 is not None
    of_sequences = (sequences.context_lens_R, sequences.slots_R, sequences.starts_R, sequences.of_row_T)
    counts = num_rows, len(sequences.starts_R), rows_TF.stride(0), first_channel
    grid = num_rows, triton.cdiv(size, CHANNELS)
    shared = {
        "F": size,
        "OF_STATE": states.recurrence.num_channels,
        "W": states.recurrence.kernel_size,
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
        "residual_conv",
        "fused",
        min_sm=80,
        priority=10,
        supports=triton_refusal,
        fn=residual_conv,
        takes_lists=True,
    )
)
