"""Reference of the choice of positions by an indexer over its paged keys (arXiv 2512.02556;
`models/chosen_keys.py`).

    s_tp = sum_h w_th relu(q_th k_p)

Keys lie in chunks of a fixed number of positions, and every row has products of its own with each of them, of
one shape; sums over heads are made by halves. So the scores of a row depend on the row and on its sequence
alone: not on the pass, nor on other rows (`attention_decode/chunks.py` has the reasons). The choice by scores
is exact.

Shapes: T rows, H heads, I numbers of a key, B blocks of the longest sequence, J chunks of N positions, K
positions chosen.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.attention_decode.chunks import CHUNK_SIZE, batched_product, filling_of
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.select import Kernel, anything, register
from compress.models.chosen_keys import chosen_keys, positions_of

MOST_GATHERED = 1 << 26
"""Numbers of the keys of the rows that are scored at once, about: 256 MiB."""


def index_choice(
    q_THI: Tensor,
    weights_TH: Tensor,
    pages: PagedLatents,
    block_table_TB: Tensor,
    ends_T: Tensor,
    *,
    top_k: int,
) -> Tensor:
    """Return the positions that rows attend to, int64 [T, K], in rising order and zeros after them: as many
    as `ends_T`, the positions that a row sees, or `top_k`. Row t has blocks `block_table_TB[t]`, of more than
    `top_k` positions; `weights_TH` are float32."""
    width = q_THI.shape[2]
    table_TB = F.pad(block_table_TB, (0, -block_table_TB.shape[1] % (CHUNK_SIZE // pages.block_size)))
    positions_P = torch.arange(table_TB.shape[1] * pages.block_size, device=q_THI.device)
    at_once = max(1, MOST_GATHERED // (len(positions_P) * width))
    chosen = []
    for start in range(0, len(q_THI), at_once):
        rows = slice(start, start + at_once)
        (k_MI, _) = pages.gather(table_TB[rows].flatten(), width, torch.float32)
        scores_TP = row_scores(q_THI[rows], weights_TH[rows], k_MI.unflatten(0, (-1, CHUNK_SIZE)))
        seen_TP = positions_P < ends_T[rows].unsqueeze(1)
        chosen.append(positions_of(chosen_keys(scores_TP, seen_TP, top_k), top_k))
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen)


def row_scores(q_THI: Tensor, weights_TH: Tensor, k_XNI: Tensor) -> Tensor:
    """Return the scores [T, P] of rows and of the chunks of their keys, T J of them."""
    # whole cache lines for each matrix of queries, and an even number of heads for each sum
    padded = max(1 << (q_THI.shape[1] - 1).bit_length(), 16 // math.gcd(q_THI.shape[2], 16))
    q_THI = F.pad(q_THI.to(torch.float32), (0, 0, 0, padded - q_THI.shape[1]))
    weights_TH = F.pad(weights_TH, (0, padded - weights_TH.shape[1]))
    num_rows, num_heads, width = q_THI.shape
    num_chunks = len(k_XNI) // num_rows
    filling = filling_of(q_THI, 1, len(k_XNI))
    q_XHI = q_THI.unsqueeze(1).expand(-1, num_chunks, -1, -1).reshape(-1, num_heads, width)
    k_XNI = F.pad(k_XNI, (0, 0, 0, 0, 0, filling))
    products = batched_product(F.pad(q_XHI, (0, 0, 0, 0, 0, filling)), k_XNI.transpose(1, 2))
    of_heads = torch.relu(products[: num_rows * num_chunks].view(num_rows, num_chunks, num_heads, -1))
    weighted = of_heads * weights_TH.view(num_rows, 1, num_heads, 1)
    while weighted.shape[2] > 1:
        first, second = weighted.chunk(2, dim=2)
        weighted = first + second
    return weighted.flatten(1)


register(Kernel("index_choice", "reference", min_sm=0, priority=0, supports=anything, fn=index_choice))
