"""The embedding of a model, with its norm and its scale.

Shapes: V vocabulary, D hidden.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.models.arch import Arch
from compress.models.hyper_connection import repeated
from compress.models.norms import unit_norm


def looked_up(arch: Arch, embed_VD: Tensor, tokens: Tensor) -> Tensor:
    """Return the embeddings [..., D] of token ids without their scale."""
    return normed(arch, F.embedding(tokens, embed_VD))


def normed(arch: Arch, x: Tensor) -> Tensor:
    """Return embeddings [..., D] normed, if those of the model are."""
    return unit_norm(x, arch.norm_eps) if arch.embed_norm else x


def embedded(arch: Arch, embed_VD: Tensor, tokens: Tensor) -> Tensor:
    """Return the embeddings [..., D] of token ids as the first layer takes them, once for each stream of the
    residual [..., n D] where it has several. Their scale is rounded to their dtype first, as `transformers`
    does: that of Gemma's bfloat16 models with 3072 channels is 55.5, not 55.4."""
    x = looked_up(arch, embed_VD, tokens)
    if arch.embed_scale != 1:
        x = x * torch.full((), arch.embed_scale, dtype=x.dtype, device=x.device)
    return repeated(arch.hyper, x)


class Embedding(nn.Embedding):
    """The embedding of a model, with its norm and its scale."""

    def __init__(self, arch: Arch) -> None:
        super().__init__(arch.vocab_size, arch.hidden_size)
        self.arch = arch

    def forward(self, tokens: Tensor) -> Tensor:
        return embedded(self.arch, self.weight, tokens)
