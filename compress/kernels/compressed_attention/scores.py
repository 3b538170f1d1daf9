"""The scores of entries by which an indexer chooses some of them for each row (`models/chosen_keys.py`).

Every product has the shape [H, I] x [I, N] and is one of a batch as in `attention_decode/chunks.py`, and the
terms of the heads are added by halves, so that the bits of a score depend on the row and the entry alone.

Shapes: T rows, H heads and I head dimension of the indexer, J chunks of N entries.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.attention_decode.chunks import batched_product, filling_of
from compress.models.compressed import sum_by_halves


def scores_of(q_THI: Tensor, factors_TH: Tensor, entries_TJNI: Tensor) -> Tensor:
    """Return the scores [T, J N], float32, of the entries of each row for its turned queries."""
    num_rows, num_heads, head_dim = q_THI.shape
    num_chunks = entries_TJNI.shape[1]
    filling = filling_of(q_THI, 1, num_rows * num_chunks)
    q_THI = q_THI.to(torch.float32)
    # Every matrix of the batch starts on a cache line, as in `attend_to_chunks`.
    q_THI = F.pad(q_THI, (0, 0, 0, -num_heads % (16 // math.gcd(head_dim, 16))))
    left = q_THI.unsqueeze(1).expand(-1, num_chunks, -1, -1).flatten(0, 1)
    left, right = (F.pad(each, (0, 0, 0, 0, 0, filling)) for each in (left, entries_TJNI.flatten(0, 1)))
    of_heads = batched_product(left, right.transpose(1, 2))[: num_rows * num_chunks, :num_heads]
    of_heads_TJHN = of_heads.unflatten(0, (num_rows, num_chunks))
    return sum_by_halves(torch.relu(of_heads_TJHN) * factors_TH[:, None, :, None]).flatten(1)
