"""The scale and the zero point, or the global scale, of a static input, from the range that calibration
observed.

    symmetric     scale = max |x| / 127 (e4m3: / 448)
    asymmetric    scale = (max - min) / 255, zero point = round(-128 - min / scale)
    blocks        global scale, from max |x| (`quant/block_inputs.py`)

The observer is min-max: the range covers every number of the calibration set, and zero. They are
found after a smoother rescaled the features, so the range is that of the inputs as they are served.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.calibrate.stats import AbsMax, InputStats, Range, Stat
from compress.errors import UsageError
from compress.quant.block_inputs import global_scale_of_inputs
from compress.quant.numerics import static_input_scale, static_input_zero_point
from compress.quant.scheme import Scheme


@dataclass(frozen=True)
class StaticInput:
    """The numbers that calibration finds for an input: float32, int8 and float32 scalars, None each where a
    scheme has none."""

    scale: Tensor | None = None
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None


def range_stats(schemes: Iterable[Scheme]) -> tuple[type[Stat], ...]:
    """Return the statistics that the static inputs of these schemes are found from."""
    symmetric = {each.input_symmetric for each in schemes if each.has_static_inputs}
    return (*((AbsMax,) if True in symmetric else ()), *((Range,) if False in symmetric else ()))


def static_input(stats: InputStats, scheme: Scheme, scale_dtype: torch.dtype) -> StaticInput:
    """Return the scale, rounded to `scale_dtype`, and the zero point of a static input, or its global
    scale.

    Raises:
        UsageError: the inputs reached NaN or infinity.
    """
    if not scheme.has_static_inputs:
        return StaticInput()
    if scheme.input_symmetric:
        largest = _finite(stats[AbsMax].max())
        if scheme.has_input_global_scale:
            return StaticInput(global_scale=global_scale_of_inputs(largest))
        return StaticInput(static_input_scale(largest, scheme, scale_dtype))
    least, most = stats[Range].whole()
    scale = static_input_scale(_finite(most - least), scheme, scale_dtype)
    return StaticInput(scale, static_input_zero_point(least, scale))


def _finite(size: Tensor) -> Tensor:
    if not bool(torch.isfinite(size)):
        raise UsageError(
            "the calibration data drives the inputs to NaN or infinity, so they have no range. "
            "Check the checkpoint."
        )
    return size
