"""The modules of gated residuals (`gated_residual.py`).

Shapes: n streams, D hidden, E = n D.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from compress.models.arch import Arch
from compress.models.gated_residual import (
    GatedResiduals,
    ResidualFacts,
    gated_mean,
    gates_of,
    injections_of,
)
from compress.models.gated_sum import GatedSum, GatedSums
from compress.models.hyper_connection import Coefficients, HyperConnection, spread
from compress.models.layer_shape import Half, LayerShape
from compress.models.linear import Linear
from compress.models.normed_sum import NormedSum, NormedSums
from compress.models.shortcut import Shortcuts, ShortcutSum, sum_of


class StreamNorm(nn.Module):
    """The norm of each stream (RMS), with weights of its own; `offset` is added to them."""

    def __init__(self, num_streams: int, size: int, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((num_streams * size,), 1.0 - offset))
        self.num_streams = num_streams
        self.eps = eps
        self.offset = offset

    def forward(self, streams_E: Tensor) -> Tensor:
        """Return the streams [..., n D], each normed."""
        x_nD = streams_E.to(torch.float32).unflatten(-1, (self.num_streams, -1))
        normed_nD = x_nD * torch.rsqrt(x_nD.square().mean(-1, keepdim=True) + self.eps)
        return (normed_nD.flatten(-2) * (self.weight.to(torch.float32) + self.offset)).to(streams_E.dtype)


class GatedResidual(nn.Module):
    """The gated residual of a half-layer, or that of the head."""

    def __init__(self, arch: Arch, facts: GatedResiduals, *, of_head: bool = False) -> None:
        super().__init__()
        size = facts.num_streams * arch.hidden_size
        self.num_streams = facts.num_streams
        self.norm = StreamNorm(facts.num_streams, arch.hidden_size, arch.norm_eps, arch.norm_offset)
        self.down = Linear(size, facts.rank, bias=False)
        self.up = Linear(facts.rank, size, bias=False)
        if not of_head:
            self.inject = Linear(size, facts.num_streams, bias=False)

    def forward(self, streams_E: Tensor) -> Tensor:
        """Return the mixture of the streams [..., D]."""
        return self._mixed(self.norm(streams_E))

    def _mixed(self, normed_E: Tensor) -> Tensor:
        gates_E = torch.sigmoid(self.up(gates_of(self.down(normed_E), self.num_streams)))
        mean_D = gated_mean(normed_E.to(torch.float32), gates_E.to(torch.float32), self.num_streams)
        return mean_D.to(normed_E.dtype)

    def enter(self, streams_E: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the mixture of the streams [..., D], which a half-layer reads, and the function that returns
        the streams after it from its output."""
        normed_E = self.norm(streams_E)
        factors_n = injections_of(self.inject(normed_E).to(torch.float32), self.num_streams)

        def leave(y_D: Tensor) -> Tensor:
            return spread(y_D, streams_E, Coefficients(factors_n, factors_n))

        return self._mixed(normed_E), leave


class GatedHead(nn.Module):
    """The mixture of streams that the head of a model with gated residuals reads, in place of a norm."""

    def __init__(self, arch: Arch, facts: GatedResiduals) -> None:
        super().__init__()
        self.hyper = GatedResidual(arch, facts, of_head=True)

    def forward(self, streams_E: Tensor) -> Tensor:
        """Return the mixture of the streams [..., D]."""
        mixed: Tensor = self.hyper(streams_E)
        return mixed


def half_residual(
    arch: Arch,
    shape: LayerShape,
    facts: ResidualFacts,
    half: Half,
    norm: Callable[[Tensor], Tensor],
    first_norm: Callable[[Tensor], Tensor],
) -> HyperConnection | GatedResidual | GatedSum | NormedSum | ShortcutSum:
    """Return the module by which a half of a layer reads the residual and adds to it; `norm` is that of its
    outputs, without a weight, where a gated sum has one, and `first_norm` is that of what it reads."""
    if isinstance(facts, NormedSums):
        return NormedSum(facts.factors(half, recurs=shape.recurrence is not None), first_norm)
    if isinstance(facts, Shortcuts):
        return ShortcutSum(sum_of(shape, half))
    if isinstance(facts, GatedSums):
        return GatedSum(arch, facts, norm, ffn=half == "ffn")
    if isinstance(facts, GatedResiduals):
        return GatedResidual(arch, facts)
    return HyperConnection(facts, arch.hidden_size, arch.norm_eps)


def gated_residual_linears(arch: Arch) -> list[str]:
    """Return the names of the linears of gated residuals in a model, those of the head last; no scheme is
    theirs."""
    if not isinstance(arch.hyper, GatedResiduals):
        return []
    names = []
    for idx, layer in enumerate(arch.layers):
        halves = (("attn_hyper", layer.has_mixer), ("ffn_hyper", layer.has_ffn))
        names += [f"layers.{idx}.{name}" for name, exists in halves if exists]
    linears = ("down", "up", "inject")
    return [f"{name}.{each}" for name in names for each in linears] + ["norm.hyper.down", "norm.hyper.up"]
