"""Reference of the steps between a fused qkv projection and attention: head norms, rotary embedding (arXiv
2104.09864), the cache's write.

Dimension c turns with its partner c + C/2; cos and sin come from `models/rope.py`, one row a position.
Each step rounds to the model's dtype, as the canonical decoder does.
"""

import torch
from torch import Tensor

from compress.kernels.operands.paged import PagedKV
from compress.kernels.rms_norm.reference import rms_norm
from compress.kernels.select import Kernel, anything, register
from compress.models.rope import rotate


def rope_store(
    qkv_TF: Tensor,
    cos_PC: Tensor,
    sin_PC: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    kv: PagedKV,
    *,
    num_heads: int,
    qk_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """Return q [T, H, C] and write keys and values of the T rows to the cache. `qk_norm` is a weight for
    each query and key head."""
    num_kv_heads = kv.k.shape[0]
    head_dim = kv.head_dim
    qkv_THC = qkv_TF.view(qkv_TF.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    qk_THC, v_TKC = torch.split(qkv_THC, [num_heads + num_kv_heads, num_kv_heads], dim=1)
    if qk_norm is not None:
        qk_THC = rms_norm(qk_THC, qk_norm, eps)
    q_THC, k_TKC = torch.split(
        rotate(qk_THC, cos_PC[positions_T], sin_PC[positions_T]), [num_heads, num_kv_heads], dim=1
    )
    kv.write_(slots_T, k_TKC, v_TKC)
    return q_THC


register(Kernel("rope_store", "reference", min_sm=0, priority=0, supports=anything, fn=rope_store))
