"""Reference decode attention over the paged cache: one query a request, keys in fixed absolute chunks.

    chunk j covers positions [j N, (j + 1) N)        s = q k^T scale,  m_j = max s,  l_j = sum e^(s - m_j),  o_j = e^(s - m_j) v
    m = max_j m_j                                    out = sum_j e^(m_j - m) o_j / sum_j e^(m_j - m) l_j,  j ascending

Every product has the shape [H/K, C] x [C, N] or [H/K, N] x [N, C] whatever the context is, masked positions weigh exactly zero, and
chunks are added one by one in order. So a request's result does not depend on its neighbours or on how long their contexts are: a
chunk beyond the context (or before the window) adds exactly zero. Computed in float32 throughout.

A batched product on the CPU gives each matrix the same bits whatever the batch (held by test); cuBLAS may choose by batch, so on CUDA
requests are computed one at a time: right, and slow.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.select import Kernel, anything, register

CHUNK_SIZE = 128
_MASKED = -1e30
"""Finite, so that a wholly masked chunk has e^0 terms rather than NaN; its weight e^(-1e30 - m) is then exactly zero."""


def attention_decode(
    q_RHC: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_RB: Tensor,
    context_lens_R: Tensor,
    window: int | None,
    scale: float,
) -> Tensor:
    """[R, H, C]. Caches are [K, num_blocks, block_size, C]; a context includes the query's own position, already written."""
    caches = (k_cache, v_cache)
    if q_RHC.device.type == "cpu":
        return _attend(q_RHC, caches, block_table_RB, context_lens_R, window, scale)
    rows = [
        _attend(q_RHC[row : row + 1], caches, block_table_RB[row : row + 1], context_lens_R[row : row + 1], window, scale)
        for row in range(q_RHC.shape[0])
    ]
    return torch.cat(rows)


def _attend(
    q_RHC: Tensor, caches: tuple[Tensor, Tensor], block_table_RB: Tensor, context_lens_R: Tensor, window: int | None, scale: float
) -> Tensor:
    """J chunks of N positions; the batch of the products is K * R * J, in that order."""
    (num_rows, num_heads, head_dim), (num_kv_heads, _, block_size, _) = q_RHC.shape, caches[0].shape
    block_table_RB = F.pad(block_table_RB, (0, -block_table_RB.shape[1] % (CHUNK_SIZE // block_size)))
    num_chunks = block_table_RB.shape[1] * block_size // CHUNK_SIZE
    blocks = block_table_RB.flatten()
    k, v = (cache.index_select(1, blocks).view(-1, CHUNK_SIZE, head_dim).to(torch.float32) for cache in caches)
    q_KRGC = q_RHC.view(num_rows, num_kv_heads, -1, head_dim).transpose(0, 1).to(torch.float32) * scale
    # MKL's bits depend on alignment: every matrix of the batch starts on a cache line (most head sizes need no padding for it).
    q_KRGC = F.pad(q_KRGC, (0, 0, 0, -q_KRGC.shape[2] % (16 // math.gcd(head_dim, 16))))
    repeat = q_KRGC.shape[2]
    q = q_KRGC.unsqueeze(2).expand(-1, -1, num_chunks, -1, -1).reshape(-1, repeat, head_dim)

    s = torch.bmm(q, k.transpose(1, 2)).view(num_kv_heads, num_rows, num_chunks, repeat, CHUNK_SIZE)
    s = s.masked_fill(_unseen(context_lens_R, num_chunks, window), _MASKED)
    m = s.amax(dim=-1, keepdim=True)
    p = (s - m).exp_()
    o = torch.bmm(p.view(-1, repeat, CHUNK_SIZE), v).view(num_kv_heads, num_rows, num_chunks, repeat, head_dim)
    out = _merge(o, m, p.sum(dim=-1, keepdim=True))[:, :, : num_heads // num_kv_heads]
    return out.transpose(0, 1).reshape(num_rows, num_heads, head_dim).to(q_RHC.dtype)


def _unseen(context_lens_R: Tensor, num_chunks: int, window: int | None) -> Tensor:
    """bool [R, J, 1, N], True where the query may not look."""
    positions = torch.arange(num_chunks * CHUNK_SIZE, device=context_lens_R.device).view(1, num_chunks, 1, CHUNK_SIZE)
    ends = context_lens_R.view(-1, 1, 1, 1)
    unseen = positions >= ends
    return unseen if window is None else unseen | (positions < ends - window)


def _merge(o: Tensor, m: Tensor, total: Tensor) -> Tensor:
    """Weighted sum over the chunk axis (2), one chunk at a time: a library's sum would associate by the number of chunks."""
    if o.shape[2] == 1:
        return (o / total).squeeze(2)
    weight = (m - m.amax(dim=2, keepdim=True)).exp_()
    o, total = o * weight, total * weight
    out, denominator = o[:, :, 0], total[:, :, 0]
    for chunk in range(1, o.shape[2]):
        out, denominator = out + o[:, :, chunk], denominator + total[:, :, chunk]
    return out / denominator


register(Kernel("attention_decode", "reference.chunks", min_sm=0, rank=0, supports=anything, fn=attention_decode))
