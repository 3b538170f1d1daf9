"""The short convolutions with a residual of a layer in one pass (`models/residual_conv.py`).

Shapes: T rows, D hidden, F outputs of the linear of q, k and v.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compress.runtime.layer_attention import Attend, Projected
from compress.runtime.layer_convs import ConvPart, LayerConvs
from compress.runtime.layer_weights import LayerWeights


@dataclass(frozen=True)
class Convolutions:
    """The convolutions of a layer over the rows of a pass: `rows` has their positions and the states of their
    sequences, and `attend` runs the kernel."""

    layer: LayerWeights
    convs: LayerConvs
    rows: Projected
    attend: Attend

    def with_keys_values(self, qkv_TF: Tensor) -> Tensor:
        """Return q, k and v with the convolutions added to k and v."""
        size = self.layer.shape.num_heads * self.layer.shape.head_dim
        return torch.cat((qkv_TF[:, :size], self._added(qkv_TF[:, size:], self.convs.keys_values)), dim=1)

    def after_attention(self, half: Callable[..., Any], *, residual: Tensor | None = None) -> Tensor:
        """Return the output [T, D] of attention with its convolution added, plus `residual` if given."""
        added_TD = self._added(half(), self.convs.attention)
        return added_TD if residual is None else residual + added_TD

    def after_ffn(self, half: Callable[..., Any], *, residual: Tensor | None = None) -> Tensor:
        """Return the output [T, D] of the FFN, or of experts, as `after_attention` does that of attention."""
        added_TD = self._added(half(), self.convs.ffn)
        return added_TD if residual is None else residual + added_TD

    def _added(self, x_TF: Tensor, part: ConvPart) -> Tensor:
        return self.attend(self.layer, replace(self.rows, qkv_TF=x_TF, conv=part))
