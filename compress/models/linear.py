"""The linears of a decoder."""

import torch.nn.functional as F
from torch import Tensor, nn

from compress.models.arch import Arch
from compress.models.layer_shape import LayerShape


class Linear(nn.Linear):
    """A linear whose weight may have fewer bits than its input; each product widens it and discards the wide
    copy. `factor` multiplies the outputs."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight.to(x.dtype), self.bias)
        return y if self.factor == 1 else y * self.factor


def linear_of(arch: Arch, shape: LayerShape, name: str) -> nn.Linear:
    rows, columns = shape.linear_shape(name, arch.hidden_size)
    linear = Linear(columns, rows, bias=arch.has_bias(name, shape))
    linear.factor = arch.factor_of(name)
    return linear
