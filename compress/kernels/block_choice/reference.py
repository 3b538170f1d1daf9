"""Reference of the choice of blocks by an indexer over its paged keys (`models/block_choice.py`).

Every row has the products with the keys of its own sequence in chunks of a fixed number, and the choice is
exact, so that it depends on the row and on its sequence alone (`attention_decode/chunks.py` has the reasons).
Keys of pooled blocks are computed anew in each call.

Shapes: T rows, N heads of the indexer, I dimensions of a head, B blocks of a table, P positions, J blocks of
the indexer, M of them chosen, W positions of these, X keys of a row.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.attention_decode.chunks import CHUNK_SIZE, batched_product, filling_of
from compress.kernels.operands.block_keys import BlockKeys
from compress.kernels.operands.paged_latents import PagedLatents, slots_of
from compress.kernels.rms_norm.reference import rms_norm
from compress.kernels.select import Kernel, anything, register
from compress.models.block_choice import chosen_blocks, keys_of_blocks, rotate_first
from compress.models.chosen_keys import positions_of

MOST_GATHERED = 1 << 26
"""Numbers of the keys of the rows that are scored at once, about: 256 MiB."""


def block_choice(
    q_TNI: Tensor, keys: BlockKeys, pages: PagedLatents, block_table_TB: Tensor, ends_T: Tensor
) -> Tensor:
    """Return the slots of the positions of the chosen blocks, int64 [T, N, W], or [T, 1, W] of a pooled
    indexer, in the order of positions, and any after them. Row t sees `ends_T[t]` positions of the blocks
    `block_table_TB[t]`."""
    facts = keys.facts
    num_positions = block_table_TB.shape[1] * pages.block_size
    last_T = (ends_T.long() - 1).clamp(min=0)
    most = facts.top_blocks + facts.pooled
    at_once = max(1, MOST_GATHERED // (num_positions * facts.head_dim))
    parts = []
    for start in range(0, len(q_TNI), at_once):
        rows = slice(start, start + at_once)
        (k_MI, _) = pages.gather(block_table_TB[rows].flatten(), facts.head_dim, pages.rows.dtype)
        k_TXI = _keys(keys, k_MI.unflatten(0, (-1, num_positions)))
        products_TNX = row_products(q_TNI[rows].to(torch.float32), k_TXI.to(torch.float32))
        chosen_TNJ = chosen_blocks(facts, products_TNX, last_T[rows], num_positions)
        blocks_XM = positions_of(chosen_TNJ.flatten(0, 1), most)
        parts.append(blocks_XM.unflatten(0, chosen_TNJ.shape[:2]))
    blocks_TNM = parts[0] if len(parts) == 1 else torch.cat(parts)
    places = torch.arange(facts.block_size, device=ends_T.device)
    positions_TNW = (blocks_TNM.unsqueeze(-1) * facts.block_size + places).flatten(-2)
    return slots_of(positions_TNW.clamp(max=num_positions - 1), block_table_TB, pages.block_size)


def _keys(keys: BlockKeys, k_TPI: Tensor) -> Tensor:
    """Return the keys [T, X, I] that queries are multiplied by."""

    def turned(means_TJI: Tensor, starts_J: Tensor) -> Tensor:
        starts_J = starts_J.clamp(max=len(keys.cos_LC) - 1)
        normed = rms_norm(means_TJI, keys.norm.weight, keys.norm.eps).unsqueeze(-2)
        return rotate_first(normed, keys.cos_LC[starts_J], keys.sin_LC[starts_J], keys.rotary_dim).squeeze(-2)

    return keys_of_blocks(keys.facts, k_TPI, turned)


def row_products(q_TNI: Tensor, k_TXI: Tensor) -> Tensor:
    """Return q . k [T, N, X] of float32 queries and of the float32 keys of each row."""
    num_rows, num_heads, width = q_TNI.shape
    num_keys = k_TXI.shape[1]
    chunks = F.pad(k_TXI, (0, 0, 0, -num_keys % CHUNK_SIZE)).unflatten(1, (-1, CHUNK_SIZE))
    num_chunks = chunks.shape[1]
    filling = filling_of(q_TNI, 1, num_rows * num_chunks)
    right = F.pad(chunks.flatten(0, 1), (0, 0, 0, 0, 0, filling)).transpose(1, 2)
    # whole cache lines for each matrix of queries
    left = F.pad(q_TNI, (0, 0, 0, -num_heads % (16 // math.gcd(width, 16))))
    left = left.unsqueeze(1).expand(-1, num_chunks, -1, -1).flatten(0, 1)
    products = batched_product(F.pad(left, (0, 0, 0, 0, 0, filling)), right)[: num_rows * num_chunks]
    by_row = products.unflatten(0, (num_rows, num_chunks)).transpose(1, 2).flatten(2)
    return by_row[:, :num_heads, :num_keys]


register(Kernel("block_choice", "reference", min_sm=0, priority=0, supports=anything, fn=block_choice))
