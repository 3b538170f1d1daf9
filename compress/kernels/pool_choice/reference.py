"""Reference of the choice of pools of positions by an indexer over its paged keys (`models/key_pools.py`).

The keys of pools are computed anew in each call, each of its positions alone, and scored like keys in
`index_choice/reference.py`, so that the scores of a row depend on the row and on its sequence alone. The
choice by scores is exact.

Shapes: T rows, H heads, I numbers of a key, B blocks of the longest sequence, P positions, X keys of a row, K
positions chosen.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.act_mul.reference import in_whole_vectors
from compress.kernels.attention_decode.chunks import CHUNK_SIZE
from compress.kernels.index_choice.reference import MOST_GATHERED, row_scores
from compress.kernels.operands.key_pools import KeyPools
from compress.kernels.operands.paged_latents import PagedLatents, slots_of
from compress.kernels.select import Kernel, anything, register
from compress.models.chosen_keys import positions_of
from compress.models.key_pools import chosen_in_pools, pool_keys


def pool_choice(
    q_THI: Tensor,
    weights_TH: Tensor,
    pages: PagedLatents,
    block_table_TB: Tensor,
    ends_T: Tensor,
    *,
    pools: KeyPools,
) -> Tensor:
    """Return the slots of the positions that rows attend to, int64 [T, K], in the order of positions: as many
    as `Indexer.num_chosen` of `ends_T`, the positions that a row sees, and after them the slot of the first
    position. Row t has blocks `block_table_TB[t]`, of more than `top_k` positions; `weights_TH` are
    float32."""
    width = q_THI.shape[2]
    num_positions = block_table_TB.shape[1] * pages.block_size
    at_once = max(1, MOST_GATHERED // (num_positions * pages.heads_and_width[1]))
    chosen = []
    for start in range(0, len(q_THI), at_once):
        rows = slice(start, start + at_once)
        read = pages.gather(block_table_TB[rows].flatten(), width, torch.float32)
        k_TPI, gate_TPI = (each.unflatten(0, (-1, num_positions)) for each in read)
        keys_TXI = pool_keys(k_TPI, gate_TPI, pools.positions_nI, in_whole_vectors)
        whole_TXI = F.pad(keys_TXI, (0, 0, 0, -keys_TXI.shape[1] % CHUNK_SIZE))
        chunks = whole_TXI.flatten(0, 1).unflatten(0, (-1, CHUNK_SIZE))
        scores_TX = row_scores(q_THI[rows], weights_TH[rows], chunks)
        chosen_TP = chosen_in_pools(pools.facts, scores_TX, ends_T[rows], num_positions)
        positions_TK = positions_of(chosen_TP, pools.facts.top_k)
        chosen.append(slots_of(positions_TK.unsqueeze(1), block_table_TB[rows], pages.block_size).squeeze(1))
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen)


register(Kernel("pool_choice", "reference", min_sm=0, priority=0, supports=anything, fn=pool_choice))
