"""The embedding of a model, with its norm and its scale, and learned embeddings of positions.

    x = scale * norm(embed[token]) + positions[position + offset]

Few models have the norm, the scale or the table of positions (GPT-2, OPT); in fewer the rows of the table are
sinusoids, which are computed (`sinusoids.py`).

Shapes: V vocabulary, D hidden, S sequence, P rows of the table of positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.models.altup import projected_streams, stream_linears
from compress.models.arch import Arch
from compress.models.hyper_connection import repeated
from compress.models.norms import unit_norm
from compress.models.sinusoids import sinusoids

EMBED_NORM = "embed.norm.weight"
EMBED_NORM_BIAS = "embed.norm.bias"
"""The weight and the bias of the norm of the embedding, in models in which it has them."""


def embed_norm(weight_D: Tensor, bias_D: Tensor | None) -> Tensor:
    """Return what `normed` takes of the weight of a norm [D] and of its bias, None where it has none."""
    return weight_D if bias_D is None else torch.stack((weight_D, bias_D))


def looked_up(arch: Arch, embed_VD: Tensor, tokens: Tensor, norm_D: Tensor | None = None) -> Tensor:
    """Return the embeddings [..., D] of token ids without their scale."""
    return normed(arch, F.embedding(tokens, embed_VD), norm_D)


def normed(arch: Arch, x: Tensor, norm_D: Tensor | None = None) -> Tensor:
    """Return embeddings [..., D] normed, if those of the model are, by a norm with the weight `norm_D` if it
    has one; with a bias, that is a second row [2, D], and the sum is rounded once."""
    assert (norm_D is not None) == arch.embed_norm_weight
    if not arch.embed_norm:
        return x
    if arch.norm == "rms":
        x = unit_norm(x, arch.norm_eps)
        return x if norm_D is None else norm_D.to(x.dtype) * x
    x_f32 = x.to(torch.float32)
    normed_f32 = unit_norm(x_f32 - x_f32.mean(-1, keepdim=True), arch.norm_eps)
    if norm_D is not None:
        weight_D, *bias_D = norm_D.to(torch.float32).view(-1, x.shape[-1])
        normed_f32 = weight_D * normed_f32
        normed_f32 = normed_f32 + bias_D[0] if bias_D else normed_f32
    return normed_f32.to(x.dtype)


def token_embeddings(arch: Arch, embed_VD: Tensor, tokens: Tensor, norm_D: Tensor | None = None) -> Tensor:
    """Return the embeddings [..., D] of token ids, scaled. Their scale is rounded to their dtype first, as
    `transformers` does: that of Gemma's bfloat16 models with 3072 channels is 55.5, not 55.4."""
    x = looked_up(arch, embed_VD, tokens, norm_D)
    if arch.embed_scale != 1:
        x = x * torch.full((), arch.embed_scale, dtype=x.dtype, device=x.device)
    return x


@dataclass(frozen=True)
class EmbeddingTables:
    """The tables of a model from which the input of its first layer is computed, on one device: the embedding
    [V, D], the learned positions [P, D], None where there are none, the projections of the streams of AltUp,
    a matrix [D, D] for each but the first, and the weight of the norm of the embedding [D], with its bias
    [2, D], None where it has none."""

    embed_VD: Tensor
    positions_PD: Tensor | None = None
    projections: tuple[Tensor, ...] = ()
    norm_D: Tensor | None = None

    def embedded(self, arch: Arch, tokens: Tensor) -> Tensor:
        """Return the input [..., S, D] of the first layer of whole sequences of token ids [..., S]: their
        embeddings, or the streams of the residual [..., S, n D] where it has several. Those of AltUp are
        computed in the dtype of their projections."""
        x = token_embeddings(arch, self.embed_VD, tokens, self.norm_D)
        if arch.sinusoidal_positions:
            x = x + sinusoids(arch, torch.arange(tokens.shape[-1], device=x.device)).to(x.dtype)
        elif self.positions_PD is not None:
            assert arch.position_offset is not None
            x = x + self.positions_PD[arch.position_offset :][: tokens.shape[-1]]
        return as_streams(arch, x, self.projections)


def as_streams(arch: Arch, x: Tensor, projections: Sequence[Tensor] = ()) -> Tensor:
    """Return embeddings [..., D] as the streams of the residual [..., n D], as they are where it is one."""
    if not arch.altup_streams:
        return repeated(arch.hyper, x)
    assert len(projections) == arch.altup_streams - 1
    return projected_streams(x.to(projections[0].dtype), projections)


class EmbedNorm(nn.Module):
    """The weight of the norm of an embedding, and its bias if it has one."""

    bias: nn.Parameter | None

    def __init__(self, size: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.register_parameter("bias", nn.Parameter(torch.zeros(size)) if bias else None)


class Embedding(nn.Embedding):
    """The embedding of a model, with its norm and its scale, and the linears of the other streams of
    AltUp."""

    def __init__(self, arch: Arch) -> None:
        super().__init__(arch.vocab_size, arch.hidden_size)
        self.arch = arch
        if arch.embed_norm_weight:
            self.norm = EmbedNorm(arch.hidden_size, bias=arch.norm_bias)
        if arch.altup_streams:
            self.streams = nn.ModuleList(stream_linears(arch))

    def forward(self, tokens: Tensor) -> Tensor:
        projections: list[Tensor] = []
        if self.arch.altup_streams:
            projections = [each.weight for each in self.streams]
        x = token_embeddings(self.arch, self.weight, tokens, self.norm_weight)
        return as_streams(self.arch, x, projections)

    @property
    def norm_weight(self) -> Tensor | None:
        """The weight of the norm [D], with its bias [2, D], None where it has none."""
        if not self.arch.embed_norm_weight:
            return None
        return embed_norm(self.norm.weight, self.norm.bias)


class LearnedPositions(nn.Embedding):
    """The table of learned positions, once for each stream of the residual."""

    def __init__(self, arch: Arch) -> None:
        super().__init__(arch.num_position_rows, arch.hidden_size)
        self.arch = arch

    def forward(self, positions: Tensor) -> Tensor:
        assert self.arch.position_offset is not None
        return repeated(self.arch.hyper, super().forward(positions + self.arch.position_offset))
