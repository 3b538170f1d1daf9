"""End-to-end tuning of a quantized model's scales: codes stay, and the scale of every group is trained to
bring the model's distribution close to its source's (the second phase of EfficientQAT, arXiv 2407.11062,
with a divergence from the source in place of the text's own tokens).

A linear is w = levels * s (1 + r), levels = codes - zero point, and r is trained: relative, since scales
of one matrix differ by orders of magnitude. Dense weights exist only during a product, forward and again
backward, so that a model in training takes little more than its codes. The gradient by a scale is that by
its weights, summed over the group.

Shapes: O out, I in, G groups, N members of a group, T tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from compress.distill.codes import levels_of
from compress.distill.quantized_student import quantized_student
from compress.models.decoder import Decoder
from compress.models.weights import Weights
from compress.quant.numerics import storable
from compress.quant.scheme import QuantizedWeight, Scheme


def tunes(scheme: Scheme) -> bool:
    """Return whether a linear of that scheme has scales of its own rows to tune; scales of one byte would
    mostly be rounded back to what they were."""
    return scheme.block_rows == 1 and scheme.scale_type is None


class TunedLinear(nn.Module):
    """A linear over fixed codes whose scales are trained; `change_OG` is the one parameter."""

    levels_OI: Tensor
    before_OG: Tensor
    bias_O: Tensor | None

    def __init__(self, weight: QuantizedWeight, bias_O: Tensor | None, *, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("levels_OI", levels_of(weight).to(device), persistent=False)
        self.register_buffer(
            "before_OG", weight.scale_OG.to(device=device, dtype=torch.float32), persistent=False
        )
        self.register_buffer("bias_O", bias_O, persistent=False)
        self.change_OG = nn.Parameter(torch.zeros(weight.scale_OG.shape, device=device))

    def forward(self, x: Tensor) -> Tensor:
        scale_OG = self.before_OG * (1 + self.change_OG)
        y = _Product.apply(x, self.levels_OI, scale_OG)  # type: ignore[no-untyped-call]
        return y if self.bias_O is None else y + self.bias_O

    @torch.no_grad()
    def tuned(self, weight: QuantizedWeight) -> QuantizedWeight:
        """Return the original weight with its tuned scales in the stored dtype; a scale that is driven to
        zero keeps its old value."""
        scale_OG = storable(self.before_OG * (1 + self.change_OG), weight.scheme, weight.scale_OG.dtype).to(
            weight.scale_OG.device
        )
        return replace(weight, scale_OG=torch.where(scale_OG > 0, scale_OG, weight.scale_OG))


class _Product(torch.autograd.Function):
    """x w^T, [.., I] -> [.., O], in the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, levels_OI: Tensor, scale_OG: Tensor) -> Tensor:
        ctx.save_for_backward(x, levels_OI, scale_OG)
        return x @ _weight(levels_OI, scale_OG, x.dtype).t()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        x, levels_OI, scale_OG = ctx.saved_tensors
        (grad,) = grad_outputs
        grad_x = grad @ _weight(levels_OI, scale_OG, x.dtype)
        grad_OI = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        grad_OG = (
            (grad_OI.to(torch.float32) * levels_OI.to(torch.float32)).view(*scale_OG.shape, -1).sum(dim=-1)
        )
        return grad_x, None, grad_OG


def _weight(levels_OI: Tensor, scale_OG: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights that consumers compute from codes and scales, without the final rounding of the
    scales."""
    levels_OGN = levels_OI.to(torch.float32).view(*scale_OG.shape, -1)
    return (levels_OGN * scale_OG.unsqueeze(-1)).view(levels_OI.shape).to(dtype)


def in_tuning(
    teacher: Decoder, layers: Callable[[int], Weights], *, dtype: torch.dtype, device: torch.device
) -> Decoder:
    """Return the quantized model in training: linears over the codes of its layers, with everything outside
    of the layers shared with the source's decoder. Only scales are trained."""

    def make_linear(weight: QuantizedWeight, bias_O: Tensor | None) -> nn.Module | None:
        return TunedLinear(weight, bias_O, device=device) if tunes(weight.scheme) else None

    return quantized_student(teacher, layers, make_linear, dtype=dtype, device=device)


def tuned_layer(student: Decoder, layer_idx: int, weights: Weights) -> dict[str, Tensor | QuantizedWeight]:
    """Return the original layer with its tuned scales."""
    tuned = dict(weights)
    for name, module in student.layers[layer_idx].named_modules():
        weight = weights.get(f"{name}.weight")
        if isinstance(module, TunedLinear) and isinstance(weight, QuantizedWeight):
            tuned[f"{name}.weight"] = module.tuned(weight)
    return tuned
