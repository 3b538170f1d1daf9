"""Reference of the steps between the linears of an indexer of positions and its choice (`models/indexer.py`):
queries grow, where they do, and turn, keys are normed and turned and written to the cache, and the weights of
heads get their factor.

Each step rounds to the model's dtype, as the canonical decoder does (`models/token_indexer.py`). Dimensions
that rotate come first in what is returned and written.

Shapes: T rows, H heads, I numbers of a key, L positions, P dimensions that rotate.
"""

import torch
from torch import Tensor

from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.query_growth import QueryGrowth
from compress.kernels.operands.rows import RowNorm
from compress.kernels.rms_norm.reference import rms_norm
from compress.kernels.select import Kernel, anything, register
from compress.models.indexer import Indexer
from compress.models.token_indexer import turned


def index_store(
    q_TF: Tensor,
    k_TI: Tensor,
    weights_TH: Tensor,
    norm: RowNorm,
    cos_LP: Tensor,
    sin_LP: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    pages: PagedLatents,
    *,
    facts: Indexer,
    gate_TI: Tensor | None = None,
    growth: QueryGrowth | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the queries [T, H, I] of q [T, H I], grown and rotated, and the factors of heads, float32
    [T, H], and write T rows of the cache: the keys, normed and rotated, and after them `gate_TI`, of which
    the weights of positions in pools are computed. With P = 0 nothing rotates."""
    angles = cos_LP[positions_T], sin_LP[positions_T]
    q_THI = q_TF.unflatten(1, (facts.num_heads, facts.head_dim))
    if growth is not None:
        q_THI = q_THI * growth.of(positions_T).unsqueeze(-1)
    k_TI = rms_norm(k_TI.contiguous(), norm.weight, norm.eps, centered=norm.centered, bias=norm.bias)
    k_TI = turned(facts, k_TI.unsqueeze(1), *angles).squeeze(1)
    pages.write_(slots_T, k_TI if gate_TI is None else torch.cat((k_TI, gate_TI), dim=1))
    return turned(facts, q_THI, *angles), weights_TH * facts.score_scale


register(Kernel("index_store", "reference", min_sm=0, priority=0, supports=anything, fn=index_store))
