"""A backward pass with one layer on the device at a time: gradients of the model's own loss at the outputs of every linear.

    forward    x_0 = embed(tokens), x_{l+1} = layer_l(x_l); every x_l is kept
    labels     drawn from the model's own predictions: the mean of g g^T over them is the Fisher matrix of the model's distribution
    backward   layer by layer from the last: run again from x_l with a graph, g at its output gives g at its linears and at x_l

The loss of a sample is the sum of -log p(label) over its positions. The inputs of the layers lie in host memory between the two directions,
pinned beside a GPU; what goes from layer to layer stays on the device. Weights are read twice, a layer at a time and the next one ahead,
as the sequential runner reads them. Parameters get no gradients.

Shapes: N samples, S sequence (T tokens of one sample), D hidden, V vocabulary, I in, O out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.calibrate.observe import observe_on_one_rank
from compress.calibrate.stats import InputStats, Stat
from compress.calibrate.streaming import LayerPrefetcher, return_freed_blocks
from compress.context import Context
from compress.errors import UsageError
from compress.models.arch import LinearGroup
from compress.models.attention import FullAttention
from compress.models.decoder import DecoderLayer, RMSNorm
from compress.models.weights import WeightSource, build_layer, dense, fill_


class GradientVisitor(Protocol):
    """Sees every layer once, the last first: `enter` with the statistics that it asks for, then `see` for each sample and group."""

    def needs(self) -> tuple[type[Stat], ...]:
        """Return the types of the statistics that `enter` reads; none by default."""
        return ()

    def enter(self, layer: DecoderLayer, stats: Mapping[str, InputStats]) -> None:
        """`stats` is tap -> statistics over all samples."""

    def see(
        self, layer: DecoderLayer, group: LinearGroup, x_TI: Tensor, gradients: Mapping[str, Tensor]
    ) -> None:
        """One sample: the input of the group, and for each of its linears the gradient at the output, [T, O]. What is to outlive the call
        must be copied."""


@dataclass(frozen=True)
class EmbedAndHead:
    """What lies before the first layer and behind the last, on the device: read once for all walks."""

    embed_VD: Tensor
    norm: RMSNorm
    head_VD: Tensor

    @staticmethod
    def load(source: WeightSource, *, compute_dtype: torch.dtype, device: torch.device) -> "EmbedAndHead":
        arch = source.arch
        outer = source.outer()
        dtype = gradient_dtype(compute_dtype)
        embed_VD = dense(outer["embed.weight"]).to(device)
        head_VD = embed_VD if arch.tied_head else dense(outer["head.weight"]).to(device)
        norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        fill_(norm, {"weight": outer["norm.weight"]}, dtype=dtype, device=device)
        return EmbedAndHead(embed_VD, norm.requires_grad_(False), head_VD.to(dtype))


def gradient_dtype(compute_dtype: torch.dtype) -> torch.dtype:
    """Gradients leave the range of float16."""
    return torch.float32 if compute_dtype == torch.float16 else compute_dtype


def visit_gradients(
    source: WeightSource,
    tokens_NS: Tensor,
    visitor: GradientVisitor,
    ctx: Context,
    *,
    compute_dtype: torch.dtype,
    draws_NS: Tensor,
    ends: EmbedAndHead | None = None,
) -> None:
    """Walk the model forward and back over the samples.

    Args:
        draws_NS: where in the cumulative prediction of each position its label lies, uniform in [0, 1).
        ends: of the source, if they are there already.

    Raises:
        UsageError: the model's logits are not finite.
        Interrupted: between layers, when the context says so.
    """
    arch = source.arch
    device = torch.device(ctx.device)
    dtype = gradient_dtype(compute_dtype)
    if device.type == "cpu":
        return_freed_blocks(arch)
    ends = ends or EmbedAndHead.load(source, compute_dtype=compute_dtype, device=device)
    x_NSD = ends.embed_VD[tokens_NS.to(device=device, dtype=torch.int64)].to(dtype)
    inputs = list[Tensor]()
    last = arch.num_layers - 1
    total = 2 * arch.num_layers
    with LayerPrefetcher(source.layer, device) as layers:
        for idx in range(arch.num_layers):
            ctx.boundary(idx, total, f"sensitivities: forward, layer {idx} of {arch.num_layers}")
            layer = build_layer(arch, idx, layers.take(idx), dtype=dtype, device=device)
            if last:
                layers.start(idx + 1 if idx < last else last - 1)
            inputs.append(_kept(x_NSD))
            _forward_(layer, x_NSD)
        gradient_NSD = x_NSD
        _at_the_end_(gradient_NSD, ends, draws_NS)
        for idx in reversed(range(arch.num_layers)):
            ctx.boundary(total - 1 - idx, total, f"sensitivities: backward, layer {idx} of {arch.num_layers}")
            if idx < last:
                layer = build_layer(arch, idx, layers.take(idx), dtype=dtype, device=device)
            if idx:
                layers.start(idx - 1)
            x_NSD = inputs.pop().to(device, non_blocking=True)
            needs = visitor.needs()
            visitor.enter(layer, observe_on_one_rank(layer, x_NSD, needs) if needs else {})
            for sample in range(len(x_NSD)):
                one = slice(sample, sample + 1)
                gradient_NSD[one] = _backward(layer, x_NSD[one], gradient_NSD[one], visitor)


def _kept(x_NSD: Tensor) -> Tensor:
    """The same numbers in host memory, when the device comes to it."""
    return torch.empty(x_NSD.shape, dtype=x_NSD.dtype, pin_memory=x_NSD.is_cuda).copy_(
        x_NSD, non_blocking=True
    )


@torch.no_grad()
def _forward_(layer: DecoderLayer, x_NSD: Tensor) -> None:
    positions = torch.arange(x_NSD.shape[1], device=x_NSD.device)
    for x_1SD in x_NSD.split(1):
        x_1SD.copy_(layer(x_1SD, positions, FullAttention()))


def _at_the_end_(x_NSD: Tensor, ends: EmbedAndHead, draws_NS: Tensor) -> None:
    """Outputs of the last layer become gradients there, of labels that lie at `draws_NS` of the cumulative predictions."""
    for kept_SD, draws_S in zip(x_NSD, draws_NS.to(x_NSD.device), strict=True):
        x_SD = kept_SD.clone().requires_grad_(True)
        logits_SV = F.linear(ends.norm(x_SD), ends.head_VD)
        (gradient_SD,) = torch.autograd.grad(logits_SV, x_SD, _of_labels(logits_SV.detach(), draws_S))
        kept_SD.copy_(gradient_SD)


@torch.no_grad()
def _of_labels(logits_SV: Tensor, draws_S: Tensor) -> Tensor:
    """The gradient at the logits of the sum of -log p(label): p less one at the label.

    Raises:
        UsageError: the logits are not finite.
    """
    p_SV = logits_SV.softmax(-1, dtype=torch.float32)
    below_SV = p_SV.cumsum(-1)
    if not bool(torch.isfinite(below_SV[:, -1]).all()):
        raise UsageError(
            "the model's logits are not finite on the calibration text: the checkpoint is damaged."
        )
    labels_S1 = torch.searchsorted(below_SV, draws_S.unsqueeze(1) * below_SV[:, -1:]).clamp_(
        max=p_SV.shape[1] - 1
    )
    return p_SV.scatter_add_(1, labels_S1, p_SV.new_full((), -1.0).expand_as(labels_S1)).to(logits_SV.dtype)


def _backward(layer: DecoderLayer, x_1SD: Tensor, gradient_1SD: Tensor, visitor: GradientVisitor) -> Tensor:
    """The gradient at the layer's input; the visitor sees those at the outputs of its linears."""
    taps: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def tap(name: str, x: Tensor) -> None:
        taps[name] = x.detach().flatten(0, -2)

    def keep(name: str) -> object:
        return layer.linear(name).register_forward_hook(
            lambda module, args, output: outputs.__setitem__(name, output)
        )

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
