"""LoRA: a trained low-rank term added to every frozen linear of the layers, merged into it at the end (arXiv
2106.09685).

    y = W x + (alpha / r) B A x,   A [r, I] normal with std 1 / sqrt(I), B [O, r] zero

so that training starts at the model as it is. The frozen weights stay in the compute dtype; A and B are
float32.

Shapes: O out, I in, R rank.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from compress.models.decoder import Decoder, DecoderLayer


class LoraLinear(nn.Module):
    def __init__(self, linear: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        num_rows, num_columns = linear.weight.shape
        device = linear.weight.device
        a_RI = torch.randn(rank, num_columns, generator=generator) * num_columns**-0.5
        self.linear = linear.requires_grad_(False)
        self.a = nn.Parameter(a_RI.to(device))
        self.b = nn.Parameter(torch.zeros(num_rows, rank, device=device))
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.scale * ((x @ self.a.to(x.dtype).T) @ self.b.to(x.dtype).T)

    def merged(self) -> Tensor:
        """Return the merged weight, float32 [O, I]."""
        return self.linear.weight.detach().to(torch.float32) + self.scale * (self.b @ self.a).detach()


def add_lora_(decoder: Decoder, rank: int, *, alpha: float, generator: torch.Generator) -> None:
    """Freeze everything and add a trained term to every linear of the layers, in the order of the model."""
    decoder.requires_grad_(False)
    for layer, name in _linears(decoder):
        place, _, leaf = name.rpartition(".")
        layer.get_submodule(place).add_module(leaf, LoraLinear(layer.linear(name), rank, alpha, generator))


def merge_lora_(decoder: Decoder) -> None:
    """Bring the trained terms into the weights; the decoder has plain float32 linears again."""
    for layer, name in _linears(decoder):
        place, _, leaf = name.rpartition(".")
        lora = layer.get_submodule(name)
        assert isinstance(lora, LoraLinear)
        linear = lora.linear
        linear.weight = nn.Parameter(lora.merged(), requires_grad=False)
        layer.get_submodule(place).add_module(leaf, linear)


def _linears(decoder: Decoder) -> Iterator[tuple[DecoderLayer, str]]:
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer)
        yield from ((layer, name) for name in layer.shape.linears)
