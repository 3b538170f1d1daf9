"""Losses of the training loop. Each takes the model and a batch of token ids int64 [B, S+1] and gives a scalar in nats per token.

Shapes: B batch, S sequence, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def next_token(model: nn.Module, tokens_BS: Tensor) -> Tensor:
    """Mean cross entropy of each token given those before it in its window."""
    logits_BSV = model(tokens_BS[:, :-1])
    return F.cross_entropy(logits_BSV.flatten(0, 1).to(torch.float32), tokens_BS[:, 1:].flatten())
