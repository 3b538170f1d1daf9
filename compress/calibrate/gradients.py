"""A backward pass with one layer on the device at a time: gradients of the model's own loss at the outputs of every linear.

    forward    x_0 = embed(tokens), x_{l+1} = layer_l(x_l); every x_l is kept
    labels     drawn from the model's own predictions: the mean of g g^T over them is the Fisher matrix of the model's distribution
    backward   layer by layer from the last: run again from x_l with a graph, g at its output gives g at its linears and at x_l

The loss of a sample is the sum of -log p(label) over its positions. What is kept of the samples between layers lies in host memory; weights
are read twice, a layer at a time, as the sequential runner reads them. Parameters get no gradients.

Shapes: N samples, S sequence (T tokens of one sample), D hidden, V vocabulary, I in, O out.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.artifact.context import Context
from compress.calibrate.observe import observe
from compress.calibrate.stats import Stat, StatFactory
from compress.errors import UsageError
from compress.models.attention import FullAttention
from compress.models.decoder import DecoderLayer, LinearGroup, RMSNorm
from compress.models.weights import WeightSource, build_layer, dense, fill_


class GradientVisitor(Protocol):
    """Sees every layer once, the last first: `enter` with the statistics that it asks for, then `see` for each sample and group."""

    def stats(self) -> Mapping[str, StatFactory]: ...

    def enter(self, layer: DecoderLayer, stats: Mapping[str, Mapping[str, Stat]]) -> None:
        """`stats` is tap -> name -> statistic over all samples."""

    def see(self, layer: DecoderLayer, group: LinearGroup, x_TI: Tensor, gradients: Mapping[str, Tensor]) -> None:
        """One sample: the input of the group, and for each of its linears the gradient at the output, [T, O]. What is to outlive the call
        must be copied."""


def visit_gradients(
    source: WeightSource, tokens_NS: Tensor, visitor: GradientVisitor, ctx: Context, *, compute_dtype: torch.dtype, draws_NS: Tensor
) -> None:
    """Walk the model forward and back over the samples.

    Args:
        draws_NS: where in the cumulative prediction of each position its label lies, uniform in [0, 1).

    Raises:
        UsageError: the model's logits are not finite.
        Interrupted: between layers, when the context says so.
    """
    arch, device = source.arch, torch.device(ctx.device)
    dtype = torch.float32 if compute_dtype == torch.float16 else compute_dtype  # gradients leave the range of float16
    outer = source.outer()
    embed = dense(outer["embed.weight"])
    x_NSD = torch.stack([embed[sample].to(dtype) for sample in tokens_NS.to(torch.int64)])
    inputs, total = [x_NSD], 2 * arch.num_layers
    for idx in range(arch.num_layers):
        ctx.boundary(idx, total, f"sensitivities: forward, layer {idx} of {arch.num_layers}")
        inputs.append(_forward(build_layer(arch, idx, source.layer(idx), dtype=dtype, device=device), inputs[-1], device))
    head = dense(outer["embed.weight" if arch.tied_head else "head.weight"]).to(device=device, dtype=dtype)
    norm = RMSNorm(arch.hidden_size, arch.norm_eps)
    fill_(norm, {"weight": outer["norm.weight"]}, dtype=dtype, device=device)
    gradient_NSD = _at_the_end(inputs.pop(), norm.requires_grad_(False), head, draws_NS, device)
    del head
    for idx in reversed(range(arch.num_layers)):
        ctx.boundary(total - 1 - idx, total, f"sensitivities: backward, layer {idx} of {arch.num_layers}")
        layer, x_NSD = build_layer(arch, idx, source.layer(idx), dtype=dtype, device=device), inputs.pop()
        asked = visitor.stats()
        visitor.enter(layer, observe(layer, x_NSD.to(device), asked) if asked else {})
        for sample in range(x_NSD.shape[0]):
            x_1SD = x_NSD[sample : sample + 1].to(device)
            gradient_NSD[sample] = _backward(layer, x_1SD, gradient_NSD[sample : sample + 1].to(device), visitor)[0].to("cpu")


@torch.no_grad()
def _forward(layer: DecoderLayer, x_NSD: Tensor, device: torch.device) -> Tensor:
    positions = torch.arange(x_NSD.shape[1], device=device)
    return torch.cat([layer(x_1SD.to(device), positions, FullAttention()).to("cpu") for x_1SD in x_NSD.split(1)])


def _at_the_end(x_NSD: Tensor, norm: nn.Module, head_VD: Tensor, draws_NS: Tensor, device: torch.device) -> Tensor:
    """Gradients at the output of the last layer, of labels that lie at `draws_NS` of the cumulative predictions."""
    gradients = []
    for x_SD, draws_S in zip(x_NSD, draws_NS, strict=True):
        x_SD = x_SD.to(device).requires_grad_(True)
        logits_SV = F.linear(norm(x_SD), head_VD)
        (gradient_SD,) = torch.autograd.grad(logits_SV, x_SD, _of_labels(logits_SV.detach(), draws_S.to(device)))
        gradients.append(gradient_SD.to("cpu"))
    return torch.stack(gradients)


@torch.no_grad()
def _of_labels(logits_SV: Tensor, draws_S: Tensor) -> Tensor:
    """The gradient at the logits of the sum of -log p(label): p less one at the label.

    Raises:
        UsageError: the logits are not finite.
    """
    p_SV = logits_SV.softmax(-1, dtype=torch.float32)
    below_SV = p_SV.cumsum(-1)
    if not bool(torch.isfinite(below_SV[:, -1]).all()):
        raise UsageError("the model's logits are not finite on the calibration text: the checkpoint is damaged.")
    labels_S1 = torch.searchsorted(below_SV, draws_S.unsqueeze(1) * below_SV[:, -1:]).clamp_(max=p_SV.shape[1] - 1)
    return p_SV.scatter_add_(1, labels_S1, p_SV.new_full((), -1.0).expand_as(labels_S1)).to(logits_SV.dtype)


def _backward(layer: DecoderLayer, x_1SD: Tensor, gradient_1SD: Tensor, visitor: GradientVisitor) -> Tensor:
    """The gradient at the layer's input; the visitor sees those at the outputs of its linears."""
    taps: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def tap(name: str, x: Tensor) -> None:
        taps[name] = x.detach().flatten(0, -2)

    def keep(name: str) -> object:
        return layer.linear(name).register_forward_hook(lambda module, args, output: outputs.__setitem__(name, output))

    hooks = [keep(name) for group in layer.groups() for name in group.linears]
    x_1SD = x_1SD.detach().requires_grad_(True)
    y_1SD = layer(x_1SD, torch.arange(x_1SD.shape[1], device=x_1SD.device), FullAttention(), tap)
    for hook in hooks:
        hook.remove()  # type: ignore[attr-defined]
    gradient, *of_outputs = torch.autograd.grad(y_1SD, [x_1SD, *outputs.values()], gradient_1SD)
    found = {name: each.flatten(0, -2) for name, each in zip(outputs, of_outputs, strict=True)}
    with torch.no_grad():
        for group in layer.groups():
            visitor.see(layer, group, taps[group.tap], {name: found[name] for name in group.linears})
    return gradient
