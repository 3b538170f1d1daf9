"""Reference prefill attention of one sequence: torch's scaled dot product, causal, over keys and values that lie dense.

One sequence a call, on operands laid out afresh: the library's bits depend on strides and alignment, and so would a sequence's on its
place in the ragged batch. They depend on its own chunk and context only.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.select import Kernel, anything, register
from compress.models.attention import causal_mask


def attention_prefill(q_THC: Tensor, k_KLC: Tensor, v_KLC: Tensor, window: int | None, scale: float) -> Tensor:
    """[T, H, C]; the T queries are the last T of the L positions."""
    num_queries, num_keys = q_THC.shape[0], k_KLC.shape[1]
    q, k, v = (each.clone(memory_format=torch.contiguous_format).unsqueeze(0) for each in (q_THC.transpose(0, 1), k_KLC, v_KLC))
    grouped = q.shape[1] != k.shape[1]
    whole = num_queries == num_keys and (window is None or window >= num_keys)
    mask = None if whole else causal_mask(num_queries, num_keys, window, q_THC.device)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=whole, scale=scale, enable_gqa=grouped)
    return out.squeeze(0).transpose(0, 1)


register(Kernel("attention_prefill", "reference.sdpa", min_sm=0, rank=0, supports=anything, fn=attention_prefill))
