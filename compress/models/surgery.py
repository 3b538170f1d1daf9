"""Changes to a layer's weights that keep its function: a per-channel scale moved from the input of linears
into what produces that input.

    x' = x / s,  W' = W * s   =>   W' x' = W x

A norm's weight or a linear's rows and bias are divided by s; the columns of the linears behind it are
multiplied (arXiv 2211.10438, section 4).

Shapes: O out, I in, K kv heads, C head dimension, R query heads per kv head.
"""

import torch
from torch import Tensor

from compress.models.decoder import SmoothingPair


def producer_scale(scale_I: Tensor, pair: SmoothingPair) -> Tensor:
    """The scale of the producer's own channels: with grouped queries the R copies of a channel must agree,
    and the first speaks for all."""
    if pair.repeat == 1:
        return scale_I
    return scale_I.view(-1, pair.repeat, pair.head_dim)[:, 0].reshape(-1)


def fold_(
    weights: dict[str, Tensor], pair: SmoothingPair, scale_I: Tensor, *, stored_dtype: torch.dtype
) -> Tensor:
    """Move `scale_I` into the producer, in place, and return the scale that the columns were in fact
    multiplied by.

    A norm's weight stays unquantized and is stored in `stored_dtype`: it is rounded to it here and the
    columns take the quotient that the rounding left, so that the function is kept to float32 precision.
    """
    name = f"{pair.producer}.weight"
    scale_P = producer_scale(scale_I, pair)
    if weights[name].dim() == 1:
        rounded = (weights[name] / scale_P).to(stored_dtype).to(torch.float32)
        scale_I = torch.where(rounded != 0, weights[name] / rounded, scale_I)
        weights[name] = rounded
    else:
        weights[name] = weights[name] / scale_P.unsqueeze(1)
        bias = f"{pair.producer}.bias"
        if bias in weights:
            weights[bias] = weights[bias] / scale_P
    for linear in pair.linears:
        weights[f"{linear}.weight"] = weights[f"{linear}.weight"] * scale_I
    return scale_I
