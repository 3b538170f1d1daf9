"""The embedding of a model, with its scale.

Shapes: V vocabulary, D hidden.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.models.arch import Arch


def embedded(arch: Arch, embed_VD: Tensor, tokens: Tensor) -> Tensor:
    """Return the embeddings [..., D] of token ids. Their scale is rounded to their dtype first, as
    `transformers` does: that of Gemma's bfloat16 models with 3072 channels is 55.5, not 55.4."""
    x = F.embedding(tokens, embed_VD)
    if arch.embed_scale == 1:
        return x
    return x * torch.full((), arch.embed_scale, dtype=x.dtype, device=x.device)


class Embedding(nn.Embedding):
    """The embedding of a model, with its scale."""

    def __init__(self, arch: Arch) -> None:
        super().__init__(arch.vocab_size, arch.hidden_size)
        self.arch = arch

    def forward(self, tokens: Tensor) -> Tensor:
        return embedded(self.arch, self.weight, tokens)
