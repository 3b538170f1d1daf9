"""Reference of the steps between the first linears of compressed attention and its products
(`models/compressed.py`): queries are normed and turned, and the cache takes the normed and turned keys, which
are the values, and after them what entries are computed of.

Shapes: T rows, H heads, C head dimension, R dimensions that rotate, L positions, F numbers for entries.
"""

import torch
from torch import Tensor

from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.rows import RowNorm
from compress.kernels.rms_norm.reference import rms_norm
from compress.kernels.select import Kernel, anything, register
from compress.models.compressed import turned


def compressed_store(
    q_TF: Tensor,
    k_TC: Tensor,
    raw_TF: Tensor | None,
    norm: RowNorm,
    cos_LR: Tensor,
    sin_LR: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    pages: PagedLatents,
) -> Tensor:
    """Return the queries [T, H, C] of q [T, H C], each head normed without a weight and turned, and write T
    rows of the cache; `raw_TF` is None in layers without entries. Norms of queries have the eps of `norm`."""
    angles = cos_LR[positions_T], sin_LR[positions_T]
    q_THC = q_TF.unflatten(1, (-1, k_TC.shape[1]))
    q_THC = turned(rms_norm(q_THC, q_TF.new_ones(k_TC.shape[1]), norm.eps), angles)
    k_TC = turned(rms_norm(k_TC, norm.weight, norm.eps).unsqueeze(1), angles).squeeze(1)
    pages.write_(slots_T, k_TC if raw_TF is None else torch.cat((k_TC, raw_TF), dim=1))
    return q_THC


register(
    Kernel("compressed_store", "reference", min_sm=0, priority=0, supports=anything, fn=compressed_store)
)
