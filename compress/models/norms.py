"""The norms of a decoder: RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450)."""

import torch
from torch import Tensor, nn

from compress.models.altup import JoinedStreams
from compress.models.arch import FINAL_NORM, Arch
from compress.models.experts import OUT_NORM, Experts
from compress.models.gated_residual import GatedResiduals
from compress.models.gated_residual_layer import GatedHead
from compress.models.gated_sum import GatedSums, InputScale
from compress.models.hyper_connection import HyperConnection, MeanOfStreams
from compress.models.norm_gradient import norm_cpu
from compress.models.normed_sum import NormedSums
from compress.models.shortcut import FirstStream, Shortcuts


class Norm(nn.Module):
    """RMSNorm over the last dimension, with the mean subtracted before if `centered` (LayerNorm), and with a
    bias added last if `bias`. `offset` is added to the weight, and the output is multiplied by `scale`. With
    `heads`, the last but one dimension, the weight is that of one head after the other."""

    bias: nn.Parameter | None

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        offset: float = 0.0,
        centered: bool = False,
        scale: float = 1.0,
        heads: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))
        self.register_parameter("bias", nn.Parameter(torch.zeros(size)) if bias else None)
        self.eps = eps
        self.offset = offset
        self.centered = centered
        self.scale = scale
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        plain = not self.centered and not self.offset and self.heads == 1 and self.bias is None
        if plain and x.device.type == "cpu" and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            normed = norm_cpu(x, self.weight, self.eps)
        else:
            x_f32 = x.to(torch.float32)
            if self.centered:
                x_f32 = x_f32 - x_f32.mean(-1, keepdim=True)
            normed = x_f32 * torch.rsqrt(x_f32.square().mean(-1, keepdim=True) + self.eps)
            if plain:
                normed = self.weight * normed.to(x.dtype)
            else:  # in float32, as `transformers` computes these
                weight = self.weight if self.heads == 1 else self.weight.view(self.heads, -1)
                normed = (weight.to(torch.float32) + self.offset) * normed
                if self.bias is not None:
                    normed = normed + self.bias.to(torch.float32)
                normed = normed.to(x.dtype)
        return normed if self.scale == 1 else normed * self.scale


class UnitNorm(nn.Module):
    """A norm over the last dimension without a weight, with the mean subtracted before if `centered`; the
    output is multiplied by `scale`."""

    def __init__(self, eps: float, *, centered: bool, scale: float = 1.0) -> None:
        super().__init__()
        self.eps = eps
        self.centered = centered
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        x_f32 = x.to(torch.float32)
        if self.centered:
            x_f32 = x_f32 - x_f32.mean(-1, keepdim=True)
        normed = unit_norm(x_f32, self.eps).to(x.dtype)
        return normed if self.scale == 1 else normed * self.scale


def norm_of(
    arch: Arch, size: int, name: str = "", *, scale: float = 1.0, heads: int = 1, bias: bool = False
) -> Norm | UnitNorm:
    """Return a norm of a model with `size` weights; those of the stream have a canonical name, and a bias
    where the model has them, or no weights where it has none. Others have one with `bias`."""
    if arch.unit_norms and name:
        return UnitNorm(arch.eps_of(name), centered=arch.norm == "layer", scale=scale)
    return Norm(
        size,
        arch.eps_of(name),
        offset=arch.offset_of(name),
        centered=arch.norm == "layer",
        scale=scale,
        heads=heads,
        bias=arch.norm_bias if name else bias,
    )


class JoinedNorm(Norm):
    """The norm before the head of a model whose residual is several streams, of their mixture or mean."""

    def __init__(self, arch: Arch) -> None:
        offset = arch.offset_of(FINAL_NORM)
        super().__init__(arch.hidden_size, arch.norm_eps, offset=offset, scale=arch.logit_scale)
        self.of_altup = bool(arch.altup_streams)
        facts = arch.hyper
        assert not isinstance(facts, GatedResiduals | GatedSums | NormedSums)
        if facts is None:
            self.streams = JoinedStreams(arch)
        elif isinstance(facts, Shortcuts):
            self.hyper: nn.Module = FirstStream()
        elif facts.mean_head:
            self.hyper = MeanOfStreams(facts.num_streams)
        else:
            self.hyper = HyperConnection(facts, arch.hidden_size, arch.norm_eps, of_head=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.streams(x) if self.of_altup else self.hyper(x))


class InputScaledNorm(InputScale):
    """RMSNorm whose weights multiply its input and not its output."""

    def __init__(self, size: int, eps: float, offset: float) -> None:
        super().__init__(size, offset)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return unit_norm(super().forward(x), self.eps)


def norm_of_latents(arch: Arch, facts: Experts, name: str) -> nn.Module:
    """Return the norm of latents, or of the outputs of experts, by its canonical name; an identity where a
    mixture has none."""
    if not facts.latent_norms:
        return nn.Identity()
    if name == OUT_NORM:
        return InputScaledNorm(facts.latent_size, arch.eps_of(name), arch.offset_of(name))
    return norm_of(arch, facts.latent_size, name)


def final_norm(arch: Arch) -> Norm | UnitNorm | GatedHead:
    """Return the norm before the head; its output has the scale of the logits. It reads the output of the
    last layer, and joins its streams where there are several; with gated residuals it is their mixture."""
    if isinstance(arch.hyper, GatedResiduals):
        return GatedHead(arch, arch.hyper)
    if arch.num_streams > 1:
        return JoinedNorm(arch)
    return norm_of(arch, arch.hidden_size, FINAL_NORM, scale=arch.logit_scale)


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """Return x divided by the root of the mean square over its last dimension: RMSNorm without a weight."""
    x_f32 = x.to(torch.float32)
    return (x_f32 * torch.rsqrt(x_f32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
