"""Quantization of weights in arithmetic: the choice of scales, rounding to the nearest code, and their
composition.

Symmetric scales are s = absmax / ((2^b - 1) / 2), that is absmax / 7.5 for four bits, so that both ends of
[-8, 7] have the same error (the convention of compressed-tensors; absmax / 7 has 12 % more error). Scales of
e4m3 are absmax / 448; its codes are rounded to the nearest, ties to even, and saturate, because e4m3 has no
infinity and an overflow would become NaN. Scales of e2m1 are absmax / 6, in e8m0 the power of two above that.
Asymmetric schemes have s = (max - min) / (2^b - 1) and z =
round(min_code - min / s), with a range that always contains zero. Scales are rounded to the stored dtype
before any code is chosen.

`search_scale` shrinks the range on a grid and keeps, per scale group, the one with the least error: squared
error, or the error of the layer's output as the group's own block of H = E[x x^T] measures it (the clipping
search of AWQ, arXiv 2306.00978, without running any token again).

A scale that several output channels share covers the columns of all of them. Then O, of a grouped weight and
of its scales, is the number of blocks of channels (R in `scheme.py`), and an incomplete last block is padded
with zeros, which change no range and have no error.

Shapes: O out, I in, G scale groups, N weights of a scale group.
"""

from typing import Literal

import torch
from torch import Tensor

from compress.quant import e2m1, scale_grid
from compress.quant.products import product
from compress.quant.scheme import QuantizedWeight, Scheme

GRID_SIZE = 40
"""Steps of the range search, from the full range to the share of it that `smallest_range_frac` returns."""
_SMALL_SCALE = 2.0**-17
"""Smallest scale from which on float16 can represent every bfloat16 number (up to its largest, which no scale
comes near)."""
_LEAST_SCALE = 2.0**-24
"""Smallest float16 number. Smaller scales become it instead of 0, which would turn a row of small weights
into zeros."""


def grouped(w_OI: Tensor, scheme: Scheme) -> Tensor:
    """Return the weights by scale group, [O, I] -> [O, G, N]."""
    groups = scheme.num_groups(w_OI.shape[1])
    if scheme.block_rows == 1:
        return w_OI.reshape(w_OI.shape[0], groups, -1)
    blocks = whole_blocks(w_OI, scheme).view(-1, scheme.block_rows, groups, w_OI.shape[1] // groups)
    return blocks.transpose(1, 2).reshape(len(blocks), groups, -1)


def ungrouped(w_OGN: Tensor, scheme: Scheme, shape: torch.Size) -> Tensor:
    """Return the inverse of `grouped`, [O, G, N] -> [O, I]."""
    if scheme.block_rows == 1:
        return w_OGN.view(shape)
    num_blocks, groups, _ = w_OGN.shape
    return (
        w_OGN.view(num_blocks, groups, scheme.block_rows, -1)
        .transpose(1, 2)
        .reshape(-1, shape[1])[: shape[0]]
    )


def whole_blocks(w_OI: Tensor, scheme: Scheme) -> Tensor:
    """Return the weights padded with rows of zeros to whole blocks of rows."""
    missing = -w_OI.shape[0] % scheme.block_rows
    return torch.nn.functional.pad(w_OI, (0, 0, 0, missing)) if missing else w_OI


def min_max_scale(
    w_OGN: Tensor, scheme: Scheme, scale_dtype: torch.dtype, *, range_frac: float | Tensor = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Return scale [O, G] in `scale_dtype` and zero point int8 [O, G] (None if symmetric) from each group's
    range times `range_frac`."""
    return _scale_from_range(*_range(w_OGN, scheme), scheme, scale_dtype, range_frac)


def _range(w_OGN: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest number that each group must represent, float32 [O, G]."""
    if scheme.symmetric:
        absmax = w_OGN.abs().amax(dim=-1).to(torch.float32)
        return -absmax, absmax
    return w_OGN.amin(dim=-1).to(torch.float32).clamp(max=0), w_OGN.amax(dim=-1).to(torch.float32).clamp(
        min=0
    )


def _scale_from_range(
    low: Tensor, high: Tensor, scheme: Scheme, scale_dtype: torch.dtype, range_frac: float | Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return scale and zero point (None if symmetric) for ranges times `range_frac`."""
    low = low * range_frac
    high = high * range_frac
    scale = (high - low) / (scheme.max_code - scheme.min_code)
    if scheme.scale_type == "e8m0":
        scale = scale_grid.power_above(scale, torch.float32)  # the nearest one would cut up to a third
    scale = stored_scale(scale, scheme, scale_dtype)
    if scheme.symmetric:
        return scale, None
    zero_point = torch.round(scheme.min_code - low / scale.to(torch.float32)).clamp(
        scheme.min_code, scheme.max_code
    )
    return scale, zero_point.to(torch.int8)


def smallest_range_frac(scheme: Scheme) -> float:
    """Return the smallest share of a group's range that the search tries: a half, and a quarter for two bits.

    Two bits clip most: searching to a quarter lowers the squared error of groups of 128 weights with heavy
    tails (Student's t, 5 degrees of freedom) by 8 %; for three bits and more it changes nothing.
    """
    return 0.25 if scheme.type == "int" and scheme.num_bits == 2 else 0.5


def search_scale(
    w_OGN: Tensor, scheme: Scheme, scale_dtype: torch.dtype, *, h_GNN: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return scale and zero point as `min_max_scale` does, with the range of each group that minimises d^T H
    d.

    d is dequantized minus original weights; `h_GNN` None means the identity.
    """
    low, high = _range(w_OGN, scheme)
    smallest_frac = smallest_range_frac(scheme)
    best_scale, best_zero = _scale_from_range(low, high, scheme, scale_dtype, 1.0)
    best_error = _group_error(w_OGN, scheme, best_scale, best_zero, h_GNN)
    for step in range(1, GRID_SIZE):
        range_frac = 1 - step / (GRID_SIZE - 1) * (1 - smallest_frac)
        scale, zero = _scale_from_range(low, high, scheme, scale_dtype, range_frac)
        error = _group_error(w_OGN, scheme, scale, zero, h_GNN)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        if zero is not None and best_zero is not None:
            best_zero = torch.where(better, zero, best_zero)
    return best_scale, best_zero


def diagonal_blocks(h_II: Tensor, scheme: Scheme) -> Tensor:
    """Return the diagonal blocks of H, one for each scale group, [I, I] -> [G, N, N]."""
    num_groups = scheme.num_groups(h_II.shape[0])
    return (
        h_II.reshape(num_groups, len(h_II) // num_groups, num_groups, -1)
        .diagonal(dim1=0, dim2=2)
        .permute(2, 0, 1)
    )


CPU_SEARCH = 1 << 18
"""Weights whose scales a CPU searches at once: the intermediate results of one range stay in its cache for
the next."""
ScaleChoice = Literal["min_max", "mse", "hessian"]
"""How the range of a scale group is chosen: all of it, least squared error, or least output error under the
group's block of H."""


def choose_scale(
    w_OI: Tensor, scheme: Scheme, scale_dtype: torch.dtype, *, choice: ScaleChoice, h_II: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return scale [O, G] in `scale_dtype` and zero point int8 [O, G] or None; `hessian` needs H of the
    linear's input."""
    w_OGN = grouped(w_OI, scheme)
    if choice == "min_max":
        return min_max_scale(w_OGN, scheme, scale_dtype)
    assert choice == "mse" or h_II is not None, "the choice 'hessian' needs H"
    h_GNN = diagonal_blocks(h_II, scheme).contiguous() if choice == "hessian" and h_II is not None else None
    rows = len(w_OGN) if w_OI.is_cuda else max(1, CPU_SEARCH * len(w_OGN) // w_OGN.numel())
    scales, zeros = zip(
        *(search_scale(some, scheme, scale_dtype, h_GNN=h_GNN) for some in w_OGN.split(rows)), strict=True
    )
    return torch.cat(scales), None if zeros[0] is None else torch.cat(zeros)


def nearest_codes(w: Tensor, scheme: Scheme, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Return codes as float32, for broadcastable scale and zero point: clamp(round(w / s) + z), or
    e4m3(clamp(w / s)), or e2m1(clamp(w / s))."""
    scaled = w.to(torch.float32) / scale.to(torch.float32)
    if scheme.type == "float" and scheme.num_bits == 4:
        return e2m1.nearest(scaled)
    if scheme.type == "float":
        return scaled.clamp(scheme.min_code, scheme.max_code).to(scheme.code_dtype).to(torch.float32)
    codes = scaled.round_()
    if zero_point is not None:
        codes += zero_point.to(torch.float32)
    return codes.clamp_(scheme.min_code, scheme.max_code)


def round_to_nearest(
    w_OI: Tensor, scheme: Scheme, scale_OG: Tensor, zero_point_OG: Tensor | None
) -> QuantizedWeight:
    """Quantize with the given scales, each weight independently."""
    zero = None if zero_point_OG is None else zero_point_OG.unsqueeze(-1)
    codes = nearest_codes(grouped(w_OI, scheme), scheme, scale_OG.unsqueeze(-1), zero)
    return QuantizedWeight(
        scheme, ungrouped(codes, scheme, w_OI.shape).to(scheme.code_dtype), scale_OG, zero_point_OG
    )


def nearest_weight(w_OI: Tensor, scheme: Scheme, scale_dtype: torch.dtype) -> QuantizedWeight:
    """Quantize to nearest with the full range of every group: the baseline of every method."""
    return round_to_nearest(w_OI, scheme, *min_max_scale(grouped(w_OI, scheme), scheme, scale_dtype))


def static_input_scale(size: Tensor, scheme: Scheme, scale_dtype: torch.dtype) -> Tensor:
    """Return the float32 scalar that maps inputs to the codes, rounded to `scale_dtype`, in which some
    consumers store it. `size` is the largest magnitude of symmetric inputs, and of asymmetric ones the
    largest number less the least."""
    steps = scheme.max_code if scheme.input_symmetric else scheme.max_code - scheme.min_code
    return stored_scale(size.to(torch.float32) / steps, scheme, scale_dtype).to(torch.float32)


def static_input_zero_point(least: Tensor, scale: Tensor) -> Tensor:
    """Return the int8 code of zero of asymmetric inputs whose least number is `least`, at most zero."""
    return (-128 - least.to(torch.float32) / scale).round().clamp(-128, 127).to(torch.int8)


def output_error(w_OI: Tensor, candidate_OI: Tensor, h_II: Tensor) -> float:
    """Return the relative output error tr(dW H dW^T) / tr(W H W^T) of a linear whose inputs have the second
    moment H; 0 for dead inputs."""
    w = w_OI.to(torch.float32)
    delta = candidate_OI.to(torch.float32) - w_OI.to(torch.float32)
    h = h_II.to(torch.float32)
    signal = (product(w, h) * w).sum()
    return float((product(delta, h) * delta).sum() / signal) if signal > 0 else 0.0


def stored_scale(scale: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """Return the scale as it is stored; a group of zeros gets 1, or in NVFP4 what the usual global scale
    makes 1, so that no consumer divides by zero."""
    stored = storable(scale, scheme, dtype)
    of_zeros = 2.0**-scale_grid.PREFERRED_EXPONENT if scheme.scale_type == "e4m3" else 1.0
    return torch.where(stored > 0, stored, torch.full_like(stored, of_zeros))


def storable(scale: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """Return the scale rounded to `dtype`.

    The formats gptq and awq store float16, whose smallest numbers are further apart than bfloat16's: a small
    scale of integer weights becomes a number that both have, so that every format stores it exactly.
    Scales of one byte are rounded to their grid.
    """
    if scheme.scale_type is not None:
        return scale_grid.nearest(scale, scheme.scale_type, dtype)
    stored = scale.to(dtype)
    if dtype == torch.bfloat16 and scheme.type == "int":
        small = stored.abs() < _SMALL_SCALE
        if not stored.is_cuda and not bool(small.any()):  # on a GPU the test would wait for the device
            return stored
        both = stored.to(torch.float16).to(dtype)
        both = torch.where(
            (both == 0) & (stored != 0), torch.full_like(both, _LEAST_SCALE).copysign(stored), both
        )
        stored = torch.where(small, both, stored)
    return stored


def _group_error(
    w_OGN: Tensor, scheme: Scheme, scale_OG: Tensor, zero_OG: Tensor | None, h_GNN: Tensor | None
) -> Tensor:
    """Return d^T H d of each scale group, d = dequantized - w, float32 [O, G]; `h_GNN` None means the
    identity."""
    scale = scale_OG.unsqueeze(-1)
    zero = None if zero_OG is None else zero_OG.unsqueeze(-1)
    codes = nearest_codes(w_OGN, scheme, scale, zero)
    levels = codes if zero is None else codes.sub_(zero.to(torch.float32))
    delta_OGN = levels.mul_(scale.to(torch.float32)).sub_(w_OGN)
    if h_GNN is None:
        return delta_OGN.square().sum(dim=-1)
    by_channel = delta_OGN.unflatten(-1, (scheme.block_rows, -1)).transpose(1, 2).flatten(0, 1)
    errors = ((by_channel.transpose(0, 1) @ h_GNN).transpose(0, 1) * by_channel).sum(dim=-1)
    return errors.unflatten(0, (-1, scheme.block_rows)).sum(dim=1)
