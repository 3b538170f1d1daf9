"""The embedding of a model, with its norm and its scale.

Shapes: V vocabulary, D hidden.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.models.altup import projected_streams, stream_linears
from compress.models.arch import Arch
from compress.models.hyper_connection import repeated
from compress.models.norms import unit_norm


def looked_up(arch: Arch, embed_VD: Tensor, tokens: Tensor) -> Tensor:
    """Return the embeddings [..., D] of token ids without their scale."""
    return normed(arch, F.embedding(tokens, embed_VD))


def normed(arch: Arch, x: Tensor) -> Tensor:
    """Return embeddings [..., D] normed, if those of the model are."""
    return unit_norm(x, arch.norm_eps) if arch.embed_norm else x


def token_embeddings(arch: Arch, embed_VD: Tensor, tokens: Tensor) -> Tensor:
    """Return the embeddings [..., D] of token ids, scaled. Their scale is rounded to their dtype first, as
    `transformers` does: that of Gemma's bfloat16 models with 3072 channels is 55.5, not 55.4."""
    x = looked_up(arch, embed_VD, tokens)
    if arch.embed_scale != 1:
        x = x * torch.full((), arch.embed_scale, dtype=x.dtype, device=x.device)
    return x


def embedded(arch: Arch, embed_VD: Tensor, tokens: Tensor, projections: Sequence[Tensor] = ()) -> Tensor:
    """Return the input of the first layer for token ids: their embeddings [..., D], or the streams of the
    residual [..., n D] where it has several. Those of AltUp are computed in the dtype of their `projections`,
    a matrix [D, D] for each stream but the first."""
    x = token_embeddings(arch, embed_VD, tokens)
    if not arch.altup_streams:
        return repeated(arch.hyper, x)
    assert len(projections) == arch.altup_streams - 1
    return projected_streams(x.to(projections[0].dtype), projections)


class Embedding(nn.Embedding):
    """The embedding of a model, with its norm and its scale, and the linears of the other streams of
    AltUp."""

    def __init__(self, arch: Arch) -> None:
        super().__init__(arch.vocab_size, arch.hidden_size)
        self.arch = arch
        if arch.altup_streams:
            self.streams = nn.ModuleList(stream_linears(arch))

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.arch.altup_streams:
            return embedded(self.arch, self.weight, tokens)
        return embedded(self.arch, self.weight, tokens, [each.weight for each in self.streams])
