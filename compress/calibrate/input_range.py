"""The scale and the zero point of a static input, from the range that calibration observed.

    symmetric     scale = max |x| / 127 (e4m3: / 448)
    asymmetric    scale = (max - min) / 255, zero point = round(-128 - min / scale)

The observer is min-max: the range covers every number of the calibration set, and zero. Both numbers are
found after a smoother rescaled the features, so the range is that of the inputs as they are served.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from compress.calibrate.stats import AbsMax, InputStats, Range, Stat
from compress.errors import UsageError
from compress.quant.numerics import static_input_scale, static_input_zero_point
from compress.quant.scheme import Scheme

StaticInput = tuple[Tensor | None, Tensor | None]
"""A float32 scalar and an int8 scalar, None each where a scheme has none."""


def range_stats(schemes: Iterable[Scheme]) -> tuple[type[Stat], ...]:
    """Return the statistics that the static inputs of these schemes are found from."""
    symmetric = {each.input_symmetric for each in schemes if each.activation == "tensor"}
    return (*((AbsMax,) if True in symmetric else ()), *((Range,) if False in symmetric else ()))


def static_input(stats: InputStats, scheme: Scheme, scale_dtype: torch.dtype) -> StaticInput:
    """Return the scale, rounded to `scale_dtype`, and the zero point of a static input.

    Raises:
        UsageError: the inputs reached NaN or infinity.
    """
    if scheme.activation != "tensor":
        return None, None
    if scheme.input_symmetric:
        largest = stats[AbsMax].max()
        return static_input_scale(_finite(largest), scheme, scale_dtype), None
    least, most = stats[Range].whole()
    scale = static_input_scale(_finite(most - least), scheme, scale_dtype)
    return scale, static_input_zero_point(least, scale)


def _finite(size: Tensor) -> Tensor:
    if not bool(torch.isfinite(size)):
        raise UsageError(
            "the calibration data drives the inputs to NaN or infinity, so they have no range. "
            "Check the checkpoint."
        )
    return size
