"""The parts that linears over 8-bit and 4-bit codes share: weights stacked along O, and the end of a product
in float32.

Shapes: T rows, O out, I in, G groups along I.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.quant.scheme import QuantizedWeight


def coded(weights: Sequence[Tensor | QuantizedWeight]) -> list[QuantizedWeight]:
    """Return the weights, all of which must be codes."""
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    assert len(quantized) == len(weights), "a dense weight among codes"
    return quantized


def stacked_codes(weights: Sequence[QuantizedWeight], device: torch.device) -> Tensor:
    """Stack codes to [O, I], in their dtype."""
    return torch.cat([weight.codes_OI.to(device).view(torch.uint8) for weight in weights]).view(
        weights[0].codes_OI.dtype
    )


def stacked_scales(weights: Sequence[QuantizedWeight], device: torch.device) -> Tensor:
    """Stack scales to float32 [O, G]; every output row has its own, also where a block of rows shares one."""
    by_row = [weight.scheme.by_row(weight.scale_OG, weight.shape[0]) for weight in weights]
    return torch.cat([scale_OG.to(device=device, dtype=torch.float32) for scale_OG in by_row])


def finished(y_TO: Tensor, dtype: torch.dtype, bias_O: Tensor | None, residual_TO: Tensor | None) -> Tensor:
    """Round a product once to `dtype`, then add the bias, then the residual."""
    y_TO = y_TO.to(dtype)
    y_TO = y_TO if bias_O is None else y_TO + bias_O
    return y_TO if residual_TO is None else residual_TO + y_TO
