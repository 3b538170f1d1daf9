"""Short convolutions with a residual (Inkling, 2026): each channel of some values of a layer has a weighted
sum of its own last few positions added.

    y_t = x_t + (w_0 x_{t-W+1} + ... + w_{W-1} x_t)

A layer with `LayerShape.residual_convs` = W has four: of the keys and of the values, before they are normed
and cached, and of the outputs of its two halves, before they are added to the stream. All numbers are
float32, and outputs are rounded to the dtype of the model. A sequence leaves the last W - 1 inputs of every
channel for its next position, so a layer has both a cache and a state (`recurrence.py`); in its state the
channels of the keys come first, then those of the values, of the outputs of attention, and of those of the
FFN.

Shapes: B batch, S sequence, F channels, W positions of the convolution.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from compress.models.attention import AttentionFn, CachedAttention
from compress.models.recurrence import Recurrence, convolution, last_inputs

OF_KEYS = "attn.k_conv"
OF_VALUES = "attn.v_conv"
OF_ATTENTION = "attn_conv"
OF_FFN = "ffn_conv"
"""The four modules of a layer."""


@dataclass(frozen=True)
class ResidualConvs(Recurrence):
    """The state of the four convolutions of one layer: one head of as many values as there are channels, and
    keys of no numbers."""

    module: ClassVar[str] = "residual_convs"
    least_key_dim: ClassVar[int] = 0

    @property
    def first_linears(self) -> tuple[str, ...]:
        return ()

    @staticmethod
    def of(kv_size: int, hidden_size: int, kernel_size: int) -> "ResidualConvs":
        """Return the state for keys of `kv_size` channels, as many of values, and a stream of
        `hidden_size`."""
        return ResidualConvs(1, 1, 0, 2 * (kv_size + hidden_size), kernel_size)

    def linear_shapes(self, hidden_size: int) -> Mapping[str, tuple[int, int]]:
        return {}

    def dense_shapes(self, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the weights of a layer."""
        of_kv = (self.num_channels // 2 - hidden_size, 1, self.kernel_size)
        of_stream = (hidden_size, 1, self.kernel_size)
        return {
            f"{OF_KEYS}.weight": of_kv,
            f"{OF_VALUES}.weight": of_kv,
            f"{OF_ATTENTION}.weight": of_stream,
            f"{OF_FFN}.weight": of_stream,
        }


class ResidualConv(nn.Conv1d):
    """One short convolution with a residual; `name` is that of its module in a layer."""

    def __init__(self, name: str, channels: int, kernel_size: int) -> None:
        super().__init__(channels, channels, kernel_size, groups=channels, bias=False)
        self.name = name

    def added(self, x_BSF: Tensor, attention: AttentionFn | None = None, layer_idx: int = 0) -> Tensor:
        """Return x with its convolution added. A cached decode goes on from the inputs in its `attention`;
        without one the inputs before the first position are zeros."""
        wide = torch.promote_types(torch.float32, x_BSF.dtype)
        x = x_BSF.to(wide)
        past_BWF = None
        if isinstance(attention, CachedAttention):
            key = layer_idx, self.name
            past_BWF = attention.conv_inputs.get(key)
            attention.conv_inputs[key] = last_inputs(x, past_BWF, self.kernel_size[0])
        return (x + convolution(x, self.weight.to(wide).squeeze(1), past_BWF)).to(x_BSF.dtype)
