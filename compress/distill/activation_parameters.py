"""The learned parameters of activations of a quantized model are trained while its codes are: the alphas of
xIELU (`models/xielu.py`) become themselves plus p c, and c is trained from zero.

They decide how an FFN bends its inputs, which scales of rows cannot do, and are two numbers of a layer. An
alpha acts through softplus, whose derivative is never more than its value: a change of alpha by d changes
softplus(alpha) by a share of d at most. So p is, as with norms, the learning rate of relative changes over
that of codes. Parameters are rounded to their stored dtype in the forward pass, with the gradient of the
identity.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compress.models.ffn import Ffn
from compress.models.layer_shape import XIELU
from compress.models.xielu import LEARNED


class ParameterInTraining(nn.Module):
    """A parametrization of a stored parameter that adds a trained change; `pace` is the learning rate of the
    change over that of the loop."""

    def __init__(self, parameter: Tensor, *, pace: float) -> None:
        super().__init__()
        self.pace = pace
        self.change = nn.Parameter(torch.zeros_like(parameter, dtype=torch.float32))

    def forward(self, stored: Tensor) -> Tensor:
        return (stored.to(torch.float32) + self.pace * self.change).to(stored.dtype)


def train_activations_(model: nn.Module, *, pace: float) -> None:
    """Train the learned parameters of every activation of a model that has some."""
    for ffn in [each for each in model.modules() if isinstance(each, Ffn) and each.activation == XIELU]:
        for name in LEARNED:
            change = ParameterInTraining(ffn.get_parameter(name), pace=pace)
            parametrize.register_parametrization(ffn, name, change)


@torch.no_grad()
def trained_activations(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of the activations of a model that were trained, by their names."""
    return {
        f"{name}.{leaf}": getattr(module, leaf).clone()
        for name, module in model.named_modules()
        if isinstance(module, Ffn)
        for leaf in LEARNED
        if parametrize.is_parametrized(module, leaf)
    }
