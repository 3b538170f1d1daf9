"""The logits of a model, from the products of its hidden states with its head.

Shapes: T tokens, V vocabulary, D hidden.
"""

import torch
from torch import Tensor

from compress.models.arch import Arch


def capped(arch: Arch, logits: Tensor) -> Tensor:
    """Return the logits of a model from the products with its head; those of tokens that the head only pads
    are the least number of their dtype."""
    cap = arch.logit_softcap
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    if not arch.head_vocab:
        return logits
    is_padding_V = torch.arange(logits.shape[-1], device=logits.device) >= arch.head_vocab
    return logits.masked_fill(is_padding_V, torch.finfo(logits.dtype).min)


def logits_of(arch: Arch, normed_TD: Tensor, head_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """Return the logits [T, V] of a model from its last normed hidden states, in their dtype, through a head
    and its bias, if it has one."""
    products_TV = normed_TD @ head_VD.T
    return capped(arch, products_TV if bias_V is None else products_TV + bias_V.to(products_TV.dtype))
