"""A backward pass with one layer on the device at a time: gradients of the model's own loss at the outputs of
every linear.

    forward    x_0 = embed(tokens), x_{l+1} = layer_l(x_l); every x_l is kept
    labels     drawn from the model's own predictions: the mean of g g^T over them is the Fisher matrix of
               the model's distribution
    backward   layer by layer from the last: run again from x_l with a graph; g at its output gives g at its
               linears and at x_l

The loss of a sample is the sum of -log p(label) over its positions. The inputs of the layers are kept in host
memory between the two directions, pinned if the device is a GPU; activations and gradients between layers
stay on the device. Weights are read twice, one layer at a time and the next one ahead, as in the sequential
runner. Parameters get no gradients.

Shapes: N samples, S sequence (T tokens of one sample), D hidden, V vocabulary, I in, O out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.calibrate.observe import observe_on_one_rank
from compress.calibrate.side_inputs import SideInputs, joined, parts_of_kept
from compress.calibrate.stats import InputStats, Stat
from compress.calibrate.streaming import LayerPrefetcher, return_freed_blocks
from compress.context import Context
from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.attention import FullAttention
from compress.models.decoder import DecoderLayer
from compress.models.embedding import EmbeddingTables
from compress.models.gated_residual_layer import GatedHead
from compress.models.linear_groups import LinearGroup
from compress.models.logits import capped
from compress.models.norms import Norm, UnitNorm, final_norm
from compress.models.weights import (
    Weights,
    WeightSource,
    build_layer,
    dense,
    embedding_tables,
    fill_,
    layer_embed_weights,
    norm_weights,
)


class GradientVisitor(Protocol):
    """A consumer of gradients. For every layer, the last first, `start_layer` is called with the statistics
    that it needs, then `add_sample` for each sample and linear group."""

    def needs(self) -> tuple[type[Stat], ...]:
        """Return the types of the statistics that `start_layer` reads; none by default."""
        return ()

    def start_layer(self, layer: DecoderLayer, stats: Mapping[str, InputStats]) -> None:
        """Begin a layer; `stats` is tap -> statistics over all samples."""

    def add_sample(
        self, layer: DecoderLayer, group: LinearGroup, x_TI: Tensor, gradients: Mapping[str, Tensor]
    ) -> None:
        """Receive, for one sample, the input of the group and the gradient [T, O] at the output of each of
        its linears. Tensors that are kept must be copied."""


@dataclass(frozen=True)
class EmbedAndHead:
    """The parts of a model before the first layer and after the last, on the device; they are read once for
    several walks."""

    tables: EmbeddingTables
    norm: Norm | UnitNorm | GatedHead
    head_VD: Tensor
    head_bias_V: Tensor | None
    of_side_inputs: Weights

    @staticmethod
    def load(source: WeightSource, *, compute_dtype: torch.dtype, device: torch.device) -> "EmbedAndHead":
        arch = source.arch
        outer = source.outer()
        dtype = gradient_dtype(compute_dtype)
        tables = embedding_tables(outer, device, dtype)
        head_VD = tables.embed_VD if arch.tied_head else dense(outer["head.weight"]).to(device)
        norm = final_norm(arch)
        fill_(norm, norm_weights(outer), dtype=dtype, device=device)
        return EmbedAndHead(
            tables,
            norm.requires_grad_(False),
            head_VD.to(dtype),
            dense(outer["head.bias"]).to(device=device, dtype=dtype) if arch.head_bias else None,
            layer_embed_weights(outer),
        )

    def logits(self, arch: Arch, x_SD: Tensor) -> Tensor:
        """Return the logits [S, V] of outputs [S, D] of the last layer."""
        return capped(arch, F.linear(self.norm(x_SD), self.head_VD, self.head_bias_V))


def gradient_dtype(compute_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute gradients in: float32 for float16, whose range they exceed."""
    return torch.float32 if compute_dtype == torch.float16 else compute_dtype


def visit_gradients(
    source: WeightSource,
    tokens_NS: Tensor,
    visitor: GradientVisitor,
    ctx: Context,
    *,
    compute_dtype: torch.dtype,
    draws_NS: Tensor,
    outer_modules: EmbedAndHead | None = None,
    counted_NS: Tensor | None = None,
) -> None:
    """Walk the model forward and back over the samples.

    Args:
        draws_NS: uniform in [0, 1); where in the cumulative prediction of each position its label lies.
        counted_NS: the tokens whose predictions the loss counts, bool; None: all, and what follows the
            window, too.
        outer_modules: those of the source, if they are loaded already.

    Raises:
        UsageError: the model's logits are not finite.
        Interrupted: between layers, when a signal asked for it.
    """
    arch = source.arch
    device = torch.device(ctx.device)
    dtype = gradient_dtype(compute_dtype)
    if device.type == "cpu":
        return_freed_blocks(arch)
    outer_modules = outer_modules or EmbedAndHead.load(source, compute_dtype=compute_dtype, device=device)
    tokens_NS = tokens_NS.to(device=device, dtype=torch.int64)
    x_NSD = outer_modules.tables.embedded(arch, tokens_NS).to(dtype)
    side_inputs = SideInputs.of(arch, outer_modules.of_side_inputs, tokens_NS, dtype=dtype, device=device)
    inputs = list[Tensor]()
    last = arch.num_layers - 1
    total = 2 * arch.num_layers
    with LayerPrefetcher(source.layer, device) as layers:
        for idx in range(arch.num_layers):
            ctx.boundary(idx, total, f"sensitivities: forward, layer {idx} of {arch.num_layers}")
            layer = build_layer(arch, idx, layers.take(idx), dtype=dtype, device=device)
            if last:
                layers.start(idx + 1 if idx < last else last - 1)
            inputs.append(_to_host(x_NSD))
            _forward_(layer, x_NSD, side_inputs)
        gradient_NSD = x_NSD
        _replace_by_loss_gradient_(gradient_NSD, arch, outer_modules, draws_NS)
        if counted_NS is not None:
            predicted_NS = F.pad(counted_NS[:, 1:], (0, 1)).to(device)
            gradient_NSD *= predicted_NS.unsqueeze(2)
        of_kept = {idx: torch.zeros_like(each[:]) for idx, each in side_inputs.kept.items()}
        for idx in reversed(range(arch.num_layers)):
            ctx.boundary(total - 1 - idx, total, f"sensitivities: backward, layer {idx} of {arch.num_layers}")
            if idx < last:
                layer = build_layer(arch, idx, layers.take(idx), dtype=dtype, device=device)
            if idx:
                layers.start(idx - 1)
            x_NSD = inputs.pop().to(device, non_blocking=True)
            needs = visitor.needs()
            stats = observe_on_one_rank(layer, x_NSD, needs, side_inputs=side_inputs) if needs else {}
            visitor.start_layer(layer, stats)
            for sample in range(len(x_NSD)):
                one = slice(sample, sample + 1)
                gradient_NSD[one] = _backward(
                    layer,
                    x_NSD[one],
                    gradient_NSD[one],
                    visitor,
                    side_inputs.attention(one),
                    {layer_idx: each[one] for layer_idx, each in of_kept.items()},
                )


def _to_host(x_NSD: Tensor) -> Tensor:
    """Return a copy in host memory; a GPU makes it asynchronously."""
    return torch.empty(x_NSD.shape, dtype=x_NSD.dtype, pin_memory=x_NSD.is_cuda).copy_(
        x_NSD, non_blocking=True
    )


@torch.no_grad()
def _forward_(layer: DecoderLayer, x_NSD: Tensor, side_inputs: SideInputs) -> None:
    positions = torch.arange(x_NSD.shape[1], device=x_NSD.device)
    for idx, x_1SD in enumerate(x_NSD.split(1)):
        x_1SD.copy_(layer(x_1SD, positions, side_inputs.attention(slice(idx, idx + 1))))


def _replace_by_loss_gradient_(
    x_NSD: Tensor, arch: Arch, outer_modules: EmbedAndHead, draws_NS: Tensor
) -> None:
    """Replace outputs of the last layer by the gradients of the loss there. Labels lie at `draws_NS` of the
    cumulative predictions."""
    for kept_SD, draws_S in zip(x_NSD, draws_NS.to(x_NSD.device), strict=True):
        x_SD = kept_SD.clone().requires_grad_(True)
        logits_SV = outer_modules.logits(arch, x_SD)
        (gradient_SD,) = torch.autograd.grad(logits_SV, x_SD, _logits_gradient(logits_SV.detach(), draws_S))
        kept_SD.copy_(gradient_SD)


@torch.no_grad()
def _logits_gradient(logits_SV: Tensor, draws_S: Tensor) -> Tensor:
    """Return the gradient of the sum of -log p(label) at the logits: p, less one at the label.

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


def _backward(
    layer: DecoderLayer,
    x_1SD: Tensor,
    gradient_1SD: Tensor,
    visitor: GradientVisitor,
    attention: FullAttention,
    of_kept: Mapping[int, Tensor],
) -> Tensor:
    """Return the gradient at the layer's input; the visitor receives those at the outputs of its linears.
    `of_kept` are the gradients [1, S, W] at keys and values, or latents, that several layers read, by the
    layer that makes them: such a layer adds its own, and that one passes them on."""
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
    source = layer.shape.kv_source
    read: tuple[Tensor, ...] = ()
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    if source is not None:
        kept[source] = attention.kept[source]
        read = tuple(each.requires_grad_(True) for each in kept[source] if each.numel())
    attention.kept = kept
    y_1SD = layer(x_1SD, torch.arange(x_1SD.shape[1], device=x_1SD.device), attention, tap)
    for hook in hooks:
        hook.remove()  # type: ignore[attr-defined]
    made = kept[layer.layer_idx] if layer.layer_idx in of_kept else ()
    of_made = parts_of_kept(of_kept[layer.layer_idx], layer.shape) if made else ()
    gradient, *others = torch.autograd.grad(
        [y_1SD, *made], [x_1SD, *read, *outputs.values()], [gradient_1SD, *of_made]
    )
    if source is not None:
        of_kept[source].add_(joined(others[: len(read)]))
    of_outputs = others[len(read) :]
    found = {name: each.flatten(0, -2) for name, each in zip(outputs, of_outputs, strict=True)}
    with torch.no_grad():
        for group in layer.groups():
            visitor.add_sample(layer, group, taps[group.tap], {name: found[name] for name in group.linears})
    return gradient
