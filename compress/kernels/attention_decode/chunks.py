"""Reference decode attention over the paged cache: the last few queries of each request, keys in fixed
absolute chunks.

    chunk j covers positions [j N, (j + 1) N)
    s = q k^T scale (capped: c tanh(s / c)),  m_j = max s,  l_j = sum e^(s - m_j),  o_j = e^(s - m_j) v
    m = max_j m_j,    out = sum_j e^(m_j - m) o_j / sum_j e^(m_j - m) l_j,  j ascending

A sink is one more chunk, of one score and no value. With relative logits s is (q k^T scale + b) t,
and with slopes q k^T scale - m d for keys at distance d.

Every product has the shape [H/K, C] x [C, N] or [H/K, N] x [N, C] whatever the context is, masked
positions weigh exactly zero, and chunks are added one by one in order. So a request's result does not
depend on the other requests or on the length of their contexts: a chunk beyond the context (or before the
window) adds exactly zero. All arithmetic is float32.

On a CPU a batched product of two matrices or more, of at most 48 rows each, gives every matrix to one thread
and the same code (`linear/row_product.py`), so batches have at least two matrices. cuBLAS may choose its code
by the batch, so on CUDA every call has the same number of matrices. Filling blocks complete both.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.linear.row_product import MAX_ROWS
from compress.kernels.operands.paged import PagedKV
from compress.kernels.operands.relative import RelativeTerm
from compress.kernels.select import Kernel, anything, register

CHUNK_SIZE = 128
CUDA_BATCH = 64
"""Matrices of one batched product on CUDA."""
FEWEST_MATRICES = 2
"""Matrices of one batched product on a CPU, at least."""
_MASKED = -1e30
"""The score of a masked position: finite, so that a wholly masked chunk has e^0 terms rather than NaN; its
weight e^(-1e30 - m) is then exactly zero."""


def attention_decode(
    q_THC: Tensor,
    kv: PagedKV,
    block_table_RB: Tensor,
    context_lens_R: Tensor,
    *,
    q_len: int,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    relative: RelativeTerm | None = None,
    slopes_H: Tensor | None = None,
) -> Tensor:
    """Return [T, H, C], T = R * q_len. A context includes the queries' own positions, already written.

    Row r * q_len + j is computed with the context that ends at its own position, so it has the same bits
    for any q_len.
    """
    if q_len > 1:
        ends = context_lens_R.unsqueeze(1) - torch.arange(q_len - 1, -1, -1, device=context_lens_R.device)
        block_table_RB = block_table_RB.repeat_interleave(q_len, dim=0)
        context_lens_R = ends.flatten()
    terms = relative if slopes_H is None else slopes_H
    return _attend(q_THC, kv, block_table_RB, context_lens_R, window, scale, softcap, sinks_H, terms)


def _attend(
    q_RHC: Tensor,
    kv: PagedKV,
    block_table_RB: Tensor,
    context_lens_R: Tensor,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
    terms: RelativeTerm | Tensor | None,
) -> Tensor:
    """Return [R, H, C]. A row has J chunks of N positions. `terms` are relative logits or slopes [H]."""
    (num_rows, _, head_dim) = q_RHC.shape
    num_kv_heads = kv.k.shape[0]
    blocks_per_chunk = CHUNK_SIZE // kv.block_size
    block_table_RB = F.pad(block_table_RB, (0, -block_table_RB.shape[1] % blocks_per_chunk))
    num_chunks = block_table_RB.shape[1] // blocks_per_chunk
    filling = filling_of(q_RHC, num_kv_heads, num_rows * num_chunks)
    blocks = F.pad(block_table_RB.flatten(), (0, filling * blocks_per_chunk))
    k, v = (
        each.reshape(-1, CHUNK_SIZE, head_dim)
        for each in kv.gather(blocks, len(blocks) * kv.block_size, torch.float32)
    )
    unseen = _unseen(context_lens_R, num_chunks, window)
    changed = None
    if isinstance(terms, RelativeTerm):
        terms_KRJGN = _terms(terms, context_lens_R, num_kv_heads, num_chunks)
        changed = partial(_with_terms, terms, terms_KRJGN)
    elif terms is not None:
        changed = partial(_falling, _sloped(terms, context_lens_R, num_kv_heads, num_chunks))
    facts: dict[str, Any] = {"scale": scale, "softcap": softcap, "num_kv_heads": num_kv_heads}
    facts["changed"] = changed
    return attend_to_chunks(q_RHC, k, v, unseen, sinks_H=sinks_H, **facts)


def _with_terms(relative: RelativeTerm, terms_KRJGN: Tensor, s: Tensor) -> Tensor:
    """Return scores with relative logits; rows that fill up those of a head have none."""
    return relative.grown(s + F.pad(terms_KRJGN, (0, 0, 0, s.shape[3] - terms_KRJGN.shape[3])), 1)


def _falling(sloped_KRJGN: Tensor, s: Tensor) -> Tensor:
    """Return scores less what the distance of keys takes from them; rows that fill up those of a head have
    none of it."""
    return s - F.pad(sloped_KRJGN, (0, 0, 0, s.shape[3] - sloped_KRJGN.shape[3]))


def filling_of(q_RHC: Tensor, num_kv_heads: int, num_matrices: int) -> int:
    """Return how many matrices fill up the batch of the products of one KV head, which has so many."""
    if q_RHC.is_cuda:
        return -num_matrices % (CUDA_BATCH // math.gcd(CUDA_BATCH, num_kv_heads))
    return int(num_kv_heads * num_matrices < FEWEST_MATRICES)


def attend_to_chunks(
    q_RHC: Tensor,
    k: Tensor,
    v: Tensor,
    unseen: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    num_kv_heads: int = 1,
    changed: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return attention [R, H, C] of rows to J chunks of N keys and values each: k and v are float32
    [K * (R * J + filling), N, C], in that order (`filling_of`), and `unseen` is bool [R, J, 1, N], True where
    a row may not look. `changed` returns scores [K, R, J, H / K or more, N] with what is added to them."""
    (num_rows, num_heads, head_dim) = q_RHC.shape
    num_chunks = unseen.shape[1]
    filling = len(k) // num_kv_heads - num_rows * num_chunks
    q_KRGC = q_RHC.view(num_rows, num_kv_heads, -1, head_dim).transpose(0, 1).to(torch.float32) * scale
    # MKL's bits depend on alignment: every matrix of the batch starts on a cache line (most head sizes need
    # no padding for it).
    q_KRGC = F.pad(q_KRGC, (0, 0, 0, -q_KRGC.shape[2] % (16 // math.gcd(head_dim, 16))))
    repeat = q_KRGC.shape[2]

    def product(left_KRJGX: Tensor, right: Tensor) -> Tensor:
        left = F.pad(left_KRJGX.flatten(1, 2), (0, 0, 0, 0, 0, filling)).flatten(0, 1)
        chunks = batched_product(left, right).view(num_kv_heads, -1, repeat, right.shape[2])[
            :, : num_rows * num_chunks
        ]
        return chunks.view(num_kv_heads, num_rows, num_chunks, repeat, -1)

    s = product(q_KRGC.unsqueeze(2).expand(-1, -1, num_chunks, -1, -1), k.transpose(1, 2))
    if changed is not None:
        s = changed(s)
    if softcap is not None:
        s = torch.tanh(s / softcap) * softcap
    s = s.masked_fill(unseen, _MASKED)
    m = s.amax(dim=-1, keepdim=True)
    p = (s - m).exp_()
    o = product(p, v)
    total = _sum(p)
    if sinks_H is not None:
        sinks = F.pad(sinks_H.view(num_kv_heads, -1), (0, repeat - num_heads // num_kv_heads))
        m_sinks = sinks.to(torch.float32).view(num_kv_heads, 1, 1, -1, 1).expand(-1, num_rows, -1, -1, -1)
        m = torch.cat((m_sinks, m), dim=2)
        total = F.pad(total, (0, 0, 0, 0, 1, 0), value=1.0)
        o = F.pad(o, (0, 0, 0, 0, 1, 0))
    out = _merge(o, m, total)[:, :, : num_heads // num_kv_heads]
    return out.transpose(0, 1).reshape(num_rows, num_heads, head_dim).to(q_RHC.dtype)


def batched_product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply batches of matrices: on CUDA in calls of `CUDA_BATCH` matrices, on a CPU in calls of up to
    `MAX_ROWS` rows of each."""
    if not left.is_cuda:
        products = [torch.bmm(rows, right) for rows in left.split(MAX_ROWS, dim=1)]
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)
    out = left.new_empty(left.shape[0], left.shape[1], right.shape[2])
    for part in range(0, left.shape[0], CUDA_BATCH):
        calls = slice(part, part + CUDA_BATCH)
        torch.bmm(left[calls], right[calls], out=out[calls])
    return out


def _sum(p: Tensor) -> Tensor:
    """Over the last axis; on CUDA by halves, because torch's sum there associates by the number of rows."""
    if not p.is_cuda:
        return p.sum(dim=-1, keepdim=True)
    while p.shape[-1] > 1:
        first, second = p.chunk(2, dim=-1)
        p = first + second
    return p


def _terms(relative: RelativeTerm, ends_R: Tensor, num_kv_heads: int, num_chunks: int) -> Tensor:
    """Return the terms of the scores of all positions [K, R, J, H / K, N]; 0 where none is seen."""
    by_distance_RHE = relative.by_distance()
    num_rows, num_heads, extent = by_distance_RHE.shape
    positions = torch.arange(num_chunks * CHUNK_SIZE, device=ends_R.device)
    distance_R1P = ends_R.view(-1, 1, 1) - 1 - positions
    outside = (distance_R1P < 0) | (distance_R1P >= extent)
    index_RHP = distance_R1P.clamp(0, extent - 1).long().expand(-1, num_heads, -1)
    terms_RHP = by_distance_RHE.gather(2, index_RHP).masked_fill(outside, 0)
    return terms_RHP.view(num_rows, num_kv_heads, -1, num_chunks, CHUNK_SIZE).permute(1, 0, 3, 2, 4)


def _sloped(slopes_H: Tensor, ends_R: Tensor, num_kv_heads: int, num_chunks: int) -> Tensor:
    """Return the distance of all positions times the slope of each head [K, R, J, H / K, N]."""
    positions = torch.arange(num_chunks * CHUNK_SIZE, device=ends_R.device)
    distance_RJN = (ends_R.view(-1, 1) - 1 - positions).unflatten(1, (num_chunks, CHUNK_SIZE))
    return slopes_H.view(num_kv_heads, 1, 1, -1, 1) * distance_RJN.unsqueeze(2)


def _unseen(context_lens_R: Tensor, num_chunks: int, window: int | None) -> Tensor:
    """bool [R, J, 1, N], True where the query may not look."""
    positions = torch.arange(num_chunks * CHUNK_SIZE, device=context_lens_R.device).view(
        1, num_chunks, 1, CHUNK_SIZE
    )
    ends = context_lens_R.view(-1, 1, 1, 1)
    unseen = positions >= ends
    return unseen if window is None else unseen | (positions < ends - window)


def _merge(o: Tensor, m: Tensor, total: Tensor) -> Tensor:
    """Add weighted chunks along axis 2, one chunk at a time: a library's sum would associate by the number
    of chunks."""
    if o.shape[2] == 1:
        return (o / total).squeeze(2)
    weight = (m - m.amax(dim=2, keepdim=True)).exp_()
    o = o * weight
    total = total * weight
    out = o[:, :, 0]
    denominator = total[:, :, 0]
    for chunk in range(1, o.shape[2]):
        out = out + o[:, :, chunk]
        denominator = denominator + total[:, :, chunk]
    return out / denominator


register(
    Kernel(
        "attention_decode",
        "reference.chunks",
        min_sm=0,
        priority=0,
        supports=anything,
        fn=attention_decode,
    )
)
