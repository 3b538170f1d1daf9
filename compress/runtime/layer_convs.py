"""The short convolutions with a residual of a layer in serving (`models/residual_conv.py`): their weights.

Shapes: T rows, F channels, W positions of a convolution.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.models.residual_conv import OF_ATTENTION, OF_FFN, OF_KEYS, OF_VALUES
from compress.models.weights import Weights, dense
from compress.runtime.deployment import Deployment


@dataclass(frozen=True)
class ConvPart:
    """Convolutions of neighbouring channels: their weights [F, W], float32, and the first of the channels in
    the state of the layer."""

    weight_FW: Tensor
    first_channel: int


@dataclass(frozen=True)
class LayerConvs:
    """The convolutions of keys and values, side by side, of the outputs of attention, and of those of the
    FFN."""

    keys_values: ConvPart
    attention: ConvPart
    ffn: ConvPart


def layer_convs(weights: Weights, deployment: Deployment) -> LayerConvs | None:
    """Return the convolutions of a layer, None where it has none."""
    if f"{OF_FFN}.weight" not in weights:
        return None

    def of(*names: str) -> Tensor:
        stored = torch.cat([dense(weights[f"{name}.weight"]) for name in names]).squeeze(1)
        return stored.to(device=deployment.device, dtype=torch.float32).contiguous()

    kv_FW = of(OF_KEYS, OF_VALUES)
    attn_FW = of(OF_ATTENTION)
    first = len(kv_FW) + len(attn_FW)
    return LayerConvs(ConvPart(kv_FW, 0), ConvPart(attn_FW, len(kv_FW)), ConvPart(of(OF_FFN), first))
