"""Logits of the tokens in a few clusters of a vocabulary, as an assistant with ordered embeddings has them
(`models/assistant.py`).

Each cluster that a row chooses is one matrix of a batched product, and all matrices have one shape. Clusters
are chosen by exact comparisons of their scores, and of equal scores the earlier cluster comes first. So the
logits of a row depend on the row alone, not on other rows (`kernels/attention_decode/chunks.py` has the
reasons).

Shapes: R rows, D hidden size, V vocabulary, C clusters, N tokens of a cluster, J chosen clusters, X matrices
of a product.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.attention_decode.chunks import batched_product, filling_of
from compress.kernels.linear.row_product import ALIGNMENT
from compress.models.chosen_keys import chosen_keys, positions_of

MOST_GATHERED = 1 << 26
"""Numbers of the head that are gathered for rows at once, about: 256 MiB."""
LINE = ALIGNMENT // torch.float32.itemsize
"""Numbers of a cache line, on which every matrix of a product begins."""


def ordered_logits(
    hidden_RD: Tensor, scores_RC: Tensor, head_VD: Tensor, tokens_CN: Tensor, top_k: int
) -> Tensor:
    """Return float32 logits [R, V] of the tokens in the `top_k` clusters with the highest scores; minus
    infinity for all others."""
    chosen_RC = chosen_keys(scores_RC, torch.ones_like(scores_RC, dtype=torch.bool), top_k)
    tokens_RJN = tokens_CN[positions_of(chosen_RC, top_k)]
    at_once = max(1, MOST_GATHERED // (tokens_RJN[0].numel() * head_VD.shape[1]))
    logits = [
        _products(*part, head_VD).flatten(1)
        for part in zip(hidden_RD.split(at_once), tokens_RJN.split(at_once), strict=True)
    ]
    logits_RV = torch.full(
        (len(hidden_RD), len(head_VD)), float("-inf"), dtype=torch.float32, device=hidden_RD.device
    )
    return logits_RV.scatter_(1, tokens_RJN.flatten(1), logits[0] if len(logits) == 1 else torch.cat(logits))


def _products(hidden_RD: Tensor, tokens_RJN: Tensor, head_VD: Tensor) -> Tensor:
    """Return float32 products [R, J, N] of rows and of the rows of their tokens in the head."""
    num_rows, num_chosen, num_tokens = tokens_RJN.shape
    num_matrices = num_rows * num_chosen
    columns = -hidden_RD.shape[1] % LINE
    filling = filling_of(hidden_RD, 1, num_matrices)
    hidden_RD = F.pad(hidden_RD.to(torch.float32), (0, columns))
    hidden_X1D = hidden_RD.unsqueeze(1).expand(-1, num_chosen, -1).reshape(num_matrices, 1, -1)
    tokens_XN = F.pad(tokens_RJN.flatten(0, 1), (0, -num_tokens % LINE, 0, filling))
    head_XND = F.pad(head_VD[tokens_XN].to(torch.float32), (0, columns))
    products = batched_product(F.pad(hidden_X1D, (0, 0, 0, 0, 0, filling)), head_XND.transpose(1, 2))
    return products[:num_matrices, 0, :num_tokens].unflatten(0, (num_rows, num_chosen))
