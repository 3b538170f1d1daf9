"""Inputs in blocks whose scales are one byte, as the tensor cores of Blackwell read them: numbers of e2m1 or
e4m3, with a scale for each block of columns of a row.

    e8m0   scale = the least power of two that is no smaller than max |x| / largest   MXFP4, MXFP8: 32 columns
    e4m3   scale = e4m3(max |x| / largest * g) / g                                    NVFP4: 16 columns
           code = nearest(x / scale)           half-way cases to the even code; saturating at +-largest

`largest` is 6 for e2m1 and 448 for e4m3. Both scales follow the row alone; the float32 global scale g is
static. It keeps block scales within e4m3, whose largest number is 448 and whose smallest normal one 2^-6.
`global_scale_of_inputs` returns the power of two that brings the largest block scale of the calibration set
to between 128 and 256: inputs 1.75 times as large do not saturate, and blocks whose largest input is 2^-13
of the largest of all have scales of full precision.

The formulas are those of NVIDIA's conversion instructions (PTX ISA, `cvt.rp.satfinite.ue8m0x2`), which round
e8m0 scales up so that nothing saturates. compressed-tensors 0.20 takes e4m3 scales alike, and the rounded
exponent of max |x| less 2 or 8 as e8m0 scales, the rule of OCP Microscaling Formats 1.0 (section 6.3): with
it up to a seventh of the largest number of e2m1 is cut off. How weights get their scales is in `numerics.py`.

Shapes: T rows, K columns, G blocks of a row, N columns of a block.
"""

import torch
from torch import Tensor

from compress.quant import e2m1, scale_grid
from compress.quant.scheme import FP8_MAX

LEAST_POWER = 2.0**-126
"""Scale of a block of zeros in e8m0: the least normal float32."""
LARGEST = {4: e2m1.LARGEST, 8: float(FP8_MAX)}
"""Largest code by its number of bits."""


def quantize_blocks(
    x_TK: Tensor, *, block_size: int, num_bits: int, global_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return codes float8_e4m3fn [T, K] and scales float32 [T, G]. Codes of four bits are numbers of e2m1.

    Scales are e8m0, or e4m3 over `global_scale`, a float32 scalar. A block whose scale is 0 has codes 0, and
    one with a number that is not finite has the scale NaN.
    """
    assert x_TK.shape[1] % block_size == 0, f"{x_TK.shape[1]} columns are no whole blocks of {block_size}"
    x_TGN = x_TK.to(torch.float32).unflatten(1, (-1, block_size))
    largest = LARGEST[num_bits]
    absmax_TG = x_TGN.abs().amax(dim=-1)
    # The divisor is a tensor: for a Python number, torch multiplies by its reciprocal on CUDA.
    wanted_TG = absmax_TG / absmax_TG.new_full((), largest)
    if global_scale is None:
        scale_TG = scale_grid.power_above(wanted_TG, torch.float32).clamp_min(LEAST_POWER)
    else:
        g = global_scale.to(torch.float32)
        scale_TG = scale_grid.from_e4m3(scale_grid.to_e4m3(wanted_TG, g), g)
    scale_TG = torch.where(absmax_TG < torch.inf, scale_TG, torch.nan)
    steps_TGN = x_TGN / scale_TG.unsqueeze(-1)
    steps_TGN = torch.where(scale_TG.unsqueeze(-1) > 0, steps_TGN, 0.0)
    codes_TGN = e2m1.nearest(steps_TGN) if num_bits == 4 else steps_TGN.clamp(-largest, largest)
    return codes_TGN.flatten(1).to(torch.float8_e4m3fn), scale_TG


def global_scale_of_inputs(largest_input: Tensor) -> Tensor:
    """Return the global scale of e2m1 inputs whose largest magnitude on the calibration set is given, a power
    of two as a float32 scalar."""
    scale = largest_input.to(torch.float32) / e2m1.LARGEST
    _, exponent = torch.frexp(scale)
    exponent = (scale_grid.LARGEST_EXPONENT - (exponent - 1)).clamp(-126, 126)
    power = torch.ldexp(torch.ones_like(scale), exponent)
    return torch.where(scale > 0, power, torch.ones_like(scale))
