"""Reference of the step between the linears of latent attention (arXiv 2405.04434) and its rotation: queries,
keys and values side by side, as the linear of q, k and v of other models leaves them (`models/latent.py`).
"""

import torch
from torch import Tensor

from compress.kernels.select import Kernel, anything, register
from compress.models.latent import Latent


def latent_heads(q_TF: Tensor, kv_TF: Tensor, rotated_TC: Tensor, latent: Latent, head_dim: int) -> Tensor:
    """Return [T, 3 H C] of the outputs of the linears of queries [T, H C] and of keys and values [T, H (N +
    V)], and the dimensions of the keys that rotate [T, `rope_dim`]."""
    q_THC = latent.queries(q_TF, head_dim)
    return torch.cat((q_THC, *latent.keys_values(kv_TF, rotated_TC, head_dim)), dim=1).flatten(1)


register(Kernel("latent_heads", "reference", min_sm=0, priority=0, supports=anything, fn=latent_heads))
