"""Reference decode attention over cached latents (arXiv 2405.04434, section 2.1.2): all heads attend to one
key of R + P numbers a position, whose first R are the value. Queries are multiplied by the matrices of keys
before, and results by those of values after (`head_linear`).

Shapes: T rows, R requests of q_len rows, B blocks of a table, H heads, C head dimension.
"""

import torch
from torch import Tensor

from compress.kernels.attention_decode.chunks import attention_decode
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.select import Kernel, anything, register


def latent_attention(
    q_THR: Tensor,
    q_THC: Tensor,
    pages: PagedLatents,
    block_table_RB: Tensor,
    context_lens_R: Tensor,
    *,
    q_len: int,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return [T, H, R] of absorbed queries, and of rotated ones whose last dimensions rotate; T = R q_len.
    A context includes the queries' own positions, already written; with a `window` a query sees so many
    positions with its own."""
    rank = q_THR.shape[2]
    (_, width) = pages.heads_and_width
    q_THW = torch.cat((q_THR, q_THC[..., q_THC.shape[2] - (width - rank) :]), dim=-1)
    attended_THW = attention_decode(
        q_THW,
        pages.as_heads(),
        block_table_RB,
        context_lens_R,
        q_len=q_len,
        window=window,
        scale=scale,
        sinks_H=sinks_H,
    )
    return attended_THW[..., :rank].contiguous()


register(
    Kernel(
        "latent_attention", "reference.chunks", min_sm=0, priority=0, supports=anything, fn=latent_attention
    )
)
