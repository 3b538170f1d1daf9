"""Norms of a quantized model are trained while its codes are: a gain, the factor that a norm multiplies
with, becomes itself times (1 + p r), and r is trained from zero.

It scales the inputs of the linears after the norm, column by column, which scales of rows cannot do; it
costs no byte, because norms are stored in 16 bits anyway. p is the learning rate of gains over that of codes,
so that the loop has one rate. Weights are rounded to their stored dtype in the forward pass, with the
gradient of the identity.

Shapes: D size of a norm.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.func import functional_call

from compress.models.norms import Norm


class NormInTraining(nn.Module):
    """A norm whose weight is trained; `pace` is the learning rate of its relative change over that of the
    loop."""

    gain_D: Tensor

    def __init__(self, norm: Norm, *, pace: float) -> None:
        super().__init__()
        weight_D = norm.weight.detach()
        self.norm = norm.requires_grad_(False)
        self.pace = pace
        self.register_buffer("gain_D", weight_D.to(torch.float32) + norm.offset, persistent=False)
        self.change_D = nn.Parameter(torch.zeros_like(self.gain_D))

    def weight(self) -> Tensor:
        """Return the weight [D] in the dtype of the original."""
        moved_D = self.norm.weight.to(torch.float32) + self.gain_D * (self.pace * self.change_D)
        return moved_D.to(self.norm.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = functional_call(self.norm, {"weight": self.weight()}, (x,))
        return y


def train_norms_(model: nn.Module, *, pace: float, left: Collection[str] = ()) -> None:
    """Replace every norm of a model by one whose weight is trained, except those with the names `left`."""
    for name, norm in [each for each in model.named_modules() if isinstance(each[1], Norm)]:
        parent, _, leaf = name.rpartition(".")
        if leaf in left:
            continue
        setattr(model.get_submodule(parent), leaf, NormInTraining(norm, pace=pace))


@torch.no_grad()
def trained_norms(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the norms of a model that were trained, by their names."""
    return {
        f"{name}.weight": module.weight()
        for name, module in model.named_modules()
        if isinstance(module, NormInTraining)
    }
