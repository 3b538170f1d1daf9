"""The gated norm of the outputs of a Mamba-2 mixer, in Triton. The same launch keeps the inputs of the last
positions, which no other program reads any more.

Shapes: T rows, F channels of the convolution (C, B and x), Z = H V outputs of H heads, V dimension of a head,
W positions of the convolution, M inputs of a slot.
"""

from typing import Any

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, tl, triton, wait
from compress.kernels.operands.recurrent_states import MambaWeights, RecurrentStates, Sequences
from compress.kernels.recurrence.rows import rows_of

NORM_TILE = 8192
NORM_WARPS = 16
WARP_NUMBERS = 512
"""The most numbers that a program of the norm has at once, its most warps, and the numbers of a warp."""
KEPT_TILE = 1024
"""Channels whose inputs one program keeps."""


@jit()
def _gated(
    out_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    skip_ptr: tl.tensor,
    channel: tl.tensor,
    real: tl.tensor,
    gate_factor: tl.tensor,
    V: tl.constexpr,
) -> tl.tensor:
    """Return some outputs of a row, with what skips the recurrence, times silu of their gates."""
    out = tl.load(out_ptr + channel, mask=real, other=0.0)
    x = tl.load(mixed_ptr + channel, mask=real, other=0.0).to(tl.float32)
    out += tl.load(skip_ptr + channel // V, mask=real, other=0.0) * x
    gate = tl.load(gate_ptr + channel, mask=real, other=0.0).to(tl.float32) * gate_factor
    return out * (gate / (1 + tl.exp(-gate)))


@jit()
def _norm(
    x_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    found_ptr: tl.tensor,
    skip_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first_channel: tl.tensor,
    eps: tl.tensor,
    gate_factor: tl.tensor,
    V: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    NORMED: tl.constexpr,
) -> None:
    """Gate the part of a row that begins at a channel, and norm it if there is a norm; all but the weights
    are pointers to the row."""
    d = tl.arange(0, TILE)
    scale = 1.0
    if NORMED:
        square = tl.zeros([TILE], tl.float32)
        for begin in tl.static_range(0, PART, TILE):
            channel = first_channel + begin + d
            gated = _gated(found_ptr, mixed_ptr, x_ptr, skip_ptr, channel, begin + d < PART, gate_factor, V)
            square += gated * gated
        scale = tl.rsqrt(tl.sum(square, axis=0) / PART + eps)
    for begin in tl.static_range(0, PART, TILE):
        channel = first_channel + begin + d
        real = begin + d < PART
        gated = _gated(found_ptr, mixed_ptr, x_ptr, skip_ptr, channel, real, gate_factor, V)
        if NORMED:
            weight = tl.load(norm_ptr + channel, mask=real, other=0.0).to(tl.float32)
            gated = weight * (gated * scale)
        tl.store(out_ptr + channel, gated.to(out_ptr.dtype.element_ty), mask=real)


@jit()
def _keep(
    x_ptr: tl.tensor,
    past_ptr: tl.tensor,
    saved_ptr: tl.tensor,
    wanted_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    sequence: tl.tensor,
    channel: tl.tensor,
    num_rows: tl.tensor,
    num_sequences: tl.tensor,
    row_stride: tl.tensor,
    F: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    SAVES: tl.constexpr,
) -> None:
    """Keep some channels of the last inputs of a sequence, and save those before the state that is wanted."""
    start, stop, first, slot = rows_of(
        sequence, starts_ptr, context_lens_ptr, slots_ptr, num_rows, num_sequences
    )
    for idx in tl.static_range(M):
        row = stop - M + idx
        position = first + (row - start)
        kept = (channel < F) & (row >= start) & (position >= 0)
        x = tl.load(x_ptr + row.to(tl.int64) * row_stride + channel, mask=kept, other=0.0)
        place = slot * M + tl.maximum(position, 0) % M
        tl.store(past_ptr + place * F + channel, x, mask=kept)
    if SAVES:
        wanted = tl.load(wanted_ptr + slot * 2)
        saved = tl.load(wanted_ptr + slot * 2 + 1).to(tl.int64) * W
        for idx in tl.static_range(W - 1):
            position = wanted - (W - 1) + idx
            row = start + (position - first)
            kept = (channel < F) & (row >= start) & (row < stop) & (position >= 0)
            x = tl.load(x_ptr + row.to(tl.int64) * row_stride + channel, mask=kept, other=0.0)
            place = saved + tl.maximum(position, 0) % W
            tl.store(saved_ptr + place * F + channel, x, mask=kept)


@jit(varying=("row_stride",))
def _norm_and_keep(
    x_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    found_ptr: tl.tensor,
    skip_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    past_ptr: tl.tensor,
    saved_ptr: tl.tensor,
    wanted_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_sequences: tl.tensor,
    row_stride: tl.tensor,
    eps: tl.tensor,
    gate_factor: tl.tensor,
    V: tl.constexpr,
    F: tl.constexpr,
    Z: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    KEPT_TILE: tl.constexpr,
    SAVES: tl.constexpr,
    NORMED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Gate one part of a row, and norm it if there is a norm. The programs after those of all rows each keep
    some channels of the last inputs of a sequence."""
    launch_dependents(PDL)
    program = tl.program_id(0)
    keeper = program - num_rows * PARTS
    wait(PDL)
    if keeper < 0:
        row = (program // PARTS).to(tl.int64)
        _norm(
            x_ptr + row * row_stride + F,
            mixed_ptr + row * F + (F - Z),
            found_ptr + row * Z,
            skip_ptr,
            norm_ptr,
            out_ptr + row * Z,
            program % PARTS * PART,
            eps,
            gate_factor,
            V,
            PART,
            TILE,
            NORMED,
        )
    else:
        _keep(
            x_ptr,
            past_ptr,
            saved_ptr,
            wanted_ptr,
            context_lens_ptr,
            slots_ptr,
            starts_ptr,
            keeper % num_sequences,
            keeper // num_sequences * KEPT_TILE + tl.arange(0, KEPT_TILE),
            num_rows,
            num_sequences,
            row_stride,
            F,
            W,
            M,
            SAVES,
        )


def norm_and_keep(
    rows_TF: Tensor,
    mixed_TF: Tensor,
    found_TZ: Tensor,
    weights: MambaWeights,
    states: RecurrentStates,
    sequences: Sequences,
    options: dict[str, Any],
) -> Tensor:
    """Return the gated and normed outputs [T, Z] from the rows of a pass, their inputs after the convolution
    and what the recurrence found of them in float32; the inputs of the last rows are kept and saved."""
    mamba = states.recurrence
    num_rows = len(rows_TF)
    num_sequences = len(sequences.starts_R)
    out_TZ = torch.empty(num_rows, mamba.value_size, dtype=rows_TF.dtype, device=rows_TF.device)
    part = mamba.value_size // weights.norm_groups
    tile = min(NORM_TILE, triton.next_power_of_2(part))
    keepers = num_sequences * triton.cdiv(mamba.num_channels, KEPT_TILE)
    _norm_and_keep[(num_rows * weights.norm_groups + keepers,)](
        rows_TF,
        mixed_TF,
        found_TZ,
        weights.skip_H,
        weights.skip_H if weights.norm_Z is None else weights.norm_Z,
        states.inputs,
        *states.saved_inputs,
        sequences.context_lens_R,
        sequences.slots_R,
        sequences.starts_R,
        out_TZ,
        num_rows,
        num_sequences,
        rows_TF.stride(0),
        weights.norm_eps,
        weights.gate_factor,
        V=mamba.value_dim,
        F=mamba.num_channels,
        Z=mamba.value_size,
        W=mamba.kernel_size,
        M=states.inputs.shape[1],
        PARTS=weights.norm_groups,
        PART=part,
        TILE=tile,
        KEPT_TILE=KEPT_TILE,
        SAVES=sequences.chunks_C4 is not None and states.saving is not None,
        NORMED=weights.norm_Z is not None,
        num_warps=max(1, min(NORM_WARPS, tile // WARP_NUMBERS)),
        **options,
    )
    return out_TZ
