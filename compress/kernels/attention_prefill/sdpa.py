"""Reference prefill attention: torch's scaled dot product, causal, one sequence a call over its pages
gathered dense.

Each call has one sequence and freshly laid out operands: the library's bits depend on strides and
alignment, so a sequence's would depend on its place in the ragged batch. This way they depend on its own
chunk and context only.

Shapes: T rows of all sequences, L context of one, R sequences, B blocks of a table, H heads, K kv heads,
C head dimension.
"""

from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.paged import PagedKV
from compress.kernels.operands.relative import RelativeTerm
from compress.kernels.select import Kernel, anything, register
from compress.models.alibi import by_distance
from compress.models.attention import attend_with_scores, causal_mask
from compress.models.relative_logits import by_keys


def attention_prefill(
    q_THC: Tensor,
    kv: PagedKV,
    block_table_RB: Tensor,
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    *,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    relative: RelativeTerm | None = None,
    slopes_H: Tensor | None = None,
) -> Tensor:
    """Return [T, H, C]; the queries of a sequence are the last of its context, whose keys and values are all
    in the pages."""
    chunks = torch.split(q_THC, list(query_lens))
    terms: list[RelativeTerm | None] = [None] * len(query_lens)
    if relative is not None:
        stops = accumulate(query_lens)
        terms = [relative.rows(stop - size, stop) for size, stop in zip(query_lens, stops, strict=True)]
    facts: dict[str, Any] = {"window": window, "scale": scale, "softcap": softcap, "sinks_H": sinks_H}
    facts["slopes_H"] = slopes_H
    outputs = [
        _attend(chunk, *kv.gather(blocks_B, length, q_THC.dtype), relative=term, **facts)
        for chunk, blocks_B, length, term in zip(chunks, block_table_RB, context_lens, terms, strict=True)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend(
    q_THC: Tensor,
    k_KLC: Tensor,
    v_KLC: Tensor,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
    relative: RelativeTerm | None,
    slopes_H: Tensor | None,
) -> Tensor:
    num_queries = q_THC.shape[0]
    num_keys = k_KLC.shape[1]
    q, k, v = (
        each.clone(memory_format=torch.contiguous_format).unsqueeze(0)
        for each in (q_THC.transpose(0, 1), k_KLC, v_KLC)
    )
    if any(each is not None for each in (softcap, sinks_H, relative, slopes_H)):
        seen = causal_mask(num_queries, num_keys, window, q_THC.device)
        of_distance: tuple[Tensor | None, ...] = ()
        if relative is not None:
            of_distance = by_keys(relative.by_distance().transpose(0, 1), num_keys), relative.growth_T
        elif slopes_H is not None:
            of_distance = (by_distance(slopes_H, num_queries, num_keys),)
        return attend_with_scores(q, k, v, seen, scale, softcap, sinks_H, *of_distance).squeeze(0)
    grouped = q.shape[1] != k.shape[1]
    whole = num_queries == num_keys and (window is None or window >= num_keys)
    mask = None if whole else causal_mask(num_queries, num_keys, window, q_THC.device)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=whole, scale=scale, enable_gqa=grouped
    )
    return out.squeeze(0).transpose(0, 1)


register(
    Kernel(
        "attention_prefill",
        "reference.sdpa",
        min_sm=0,
        priority=0,
        supports=anything,
        fn=attention_prefill,
    )
)
