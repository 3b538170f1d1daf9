"""Reference of the steps between a fused qkv projection and attention: head norms, rotary embedding (arXiv
2104.09864), the cache's write.

Dimension c turns with its partner c + C/2; cos and sin come from `models/rope.py`, one row a position. Heads
of q and k of which leading dimensions turn are first put in this order, in which keys are stored. The norms
of q and of k span one head, before or after it is turned, where they may have a bias, or all heads at once;
the heads of v may be normed, too, without a weight. The values are the last K heads of the projection, which
may be the keys as well. Values may be narrower than keys, and are stored with zeros up to their width. A
query may be multiplied by a factor of its position, last. A layer that attends to the pages of an earlier
one has queries alone, and writes nothing.
Each step rounds to the model's dtype, as the canonical decoder does. Last, queries, keys and values may be
replaced by the Hadamard transform of their head (`hadamard/reference.py`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.hadamard.reference import hadamard as transform
from compress.kernels.operands.paged import PagedKV
from compress.kernels.rms_norm.reference import rms_norm
from compress.kernels.select import Kernel, anything, register
from compress.models.rope import in_halves, rotate


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
    qk_bias: Tensor | None = None,
    whole: bool = False,
    rotates_first: bool = False,
    centered: bool = False,
    growth_P: Tensor | None = None,
    v_norm: bool = False,
    hadamard: bool = False,
    leading_dim: int = 0,
    value_dim: int | None = None,
    early: bool = False,
) -> Tensor:
    """Return q [T, H, C] and write keys and values of the T rows to the cache. `qk_norm` is a weight for
    each query and key head of `qkv_TF`, in the dtype of q or float32 (`RowNorm`), and so is `qk_bias`, for
    weights in float32. `qkv_TF` has H + 2 K heads, or H + K where the keys before their norm are the values,
    or H where the layer attends to the pages of an earlier one: these are `kv`, and nothing is written. Where
    values are narrower than keys, the last K heads of it have `value_dim` dimensions."""
    assert not (leading_dim and rotates_first)
    assert qk_bias is None or (qk_norm is not None and not whole)
    head_dim = kv.head_dim
    if value_dim is not None and value_dim < head_dim:
        assert not v_norm
        qk_TF, v_TF = qkv_TF.split([(num_heads + kv.k.shape[0]) * head_dim, kv.k.shape[0] * value_dim], dim=1)
        v_TKC = F.pad(v_TF.unflatten(1, (-1, value_dim)), (0, head_dim - value_dim))
        qkv_TF = torch.cat((qk_TF, v_TKC.flatten(1)), dim=1)
    qkv_THC = qkv_TF.view(qkv_TF.shape[0], qkv_TF.shape[1] // head_dim, head_dim)
    num_stored = qkv_THC.shape[1]
    num_kv_heads = kv.k.shape[0] if num_stored != num_heads else 0
    assert num_stored in (num_heads + num_kv_heads, num_heads + 2 * num_kv_heads)
    qk_THC = qkv_THC[:, : num_heads + num_kv_heads]
    if qk_norm is not None and whole:
        sizes = [num_heads, num_kv_heads] if num_kv_heads else [num_heads]
        queries_keys = zip(*(x.split(sizes, dim=-2) for x in (qk_THC, qk_norm)), strict=True)
        qk_THC = torch.cat(
            [
                rms_norm(x.flatten(1), weight.flatten(), eps, centered=centered).view_as(x)
                for x, weight in queries_keys
            ],
            dim=1,
        )
    elif qk_norm is not None and not rotates_first:
        qk_THC = rms_norm(qk_THC, qk_norm, eps, centered=centered, bias=qk_bias)
    qk_THC = rotate(in_halves(qk_THC, leading_dim), cos_PC[positions_T], sin_PC[positions_T])
    if qk_norm is not None and rotates_first:
        qk_THC = rms_norm(qk_THC, qk_norm, eps, centered=centered, bias=qk_bias)
    q_THC, k_TKC = torch.split(qk_THC, [num_heads, num_kv_heads], dim=1)
    if growth_P is not None:
        q_THC = q_THC * growth_P[positions_T].view(-1, 1, 1)
    if hadamard:
        q_THC = transform(q_THC)
    if not num_kv_heads:
        return q_THC
    v_TKC = qkv_THC[:, -num_kv_heads:]
    if v_norm:
        v_TKC = rms_norm(v_TKC, v_TKC.new_ones(head_dim), eps)
    if hadamard:
        k_TKC, v_TKC = (transform(each) for each in (k_TKC, v_TKC))
    kv.write_(slots_T, k_TKC, v_TKC)
    return q_THC


register(Kernel("rope_store", "reference", min_sm=0, priority=0, supports=anything, fn=rope_store))
