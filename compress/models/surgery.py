"""Changes to a layer's weights that keep its function: a per-channel scale moved from the input of linears to
what produces it.

    x' = x / s,  W' = W * s   =>   W' x' = W x

The columns of the linears are multiplied by s; the weight of the norm, or the rows and the bias of the
linear, that produces x are divided by it (arXiv 2211.10438, section 4). Statistics of x are rescaled by the
caller.

Grouped-query attention ties columns: o reads R copies of each channel of v, one for each query head of a kv
head, so their scales must agree.

Shapes: O out, I in, P output channels of the producer, K kv heads, R query heads per kv head, C head
dimension.
"""

from typing import Literal

import torch
from torch import Tensor

from compress.models.smoothing_pair import SmoothingPair


def tie_heads(value_I: Tensor, head_repeat: tuple[int, int], reduce: Literal["mean", "max"]) -> Tensor:
    """Return [I] in which the R columns that read one channel all have their mean, or their maximum.

    `head_repeat` = (R, C); with R = 1 no columns are tied.
    """
    repeat, head_dim = head_repeat
    if repeat == 1:
        return value_I
    heads_KRC = value_I.view(-1, repeat, head_dim)
    tied_K1C = (
        heads_KRC.mean(dim=1, keepdim=True) if reduce == "mean" else heads_KRC.amax(dim=1, keepdim=True)
    )
    return tied_K1C.expand_as(heads_KRC).reshape(-1)


def producer_scale(scale_I: Tensor, pair: SmoothingPair) -> Tensor:
    """Return the scale of the producer's channels, [P]: the first of the R equal copies of each channel."""
    if pair.repeat == 1:
        return scale_I
    return scale_I.view(-1, pair.repeat, pair.head_dim)[:, 0].reshape(-1)


def fold_(
    weights: dict[str, Tensor], pair: SmoothingPair, scale_I: Tensor, *, stored_dtype: torch.dtype
) -> Tensor:
    """Move `scale_I` into the producer, in place, and return the scale [I] by which the columns were
    multiplied.

    A norm's weight is not quantized: it is rounded here to `stored_dtype`, in which it is stored, and the
    columns are multiplied by the quotient of the old weight and the rounded one. So the function is kept to
    float32 precision.
    """
    name = f"{pair.producer}.weight"
    scale_P = producer_scale(scale_I, pair)
    if weights[name].dim() == 1:
        factor_P = weights[name] + pair.offset
        weights[name] = (factor_P / scale_P - pair.offset).to(stored_dtype).to(torch.float32)
        rounded = weights[name] + pair.offset
        scale_I = torch.where(rounded != 0, factor_P / rounded, scale_I)
        scale_P = scale_I
    else:
        weights[name] = weights[name] / scale_P.unsqueeze(1)
    bias = f"{pair.producer}.bias"
    if bias in weights:
        weights[bias] = weights[bias] / scale_P
    for linear in pair.linears:
        weights[f"{linear}.weight"] = weights[f"{linear}.weight"] * scale_I
    return scale_I
