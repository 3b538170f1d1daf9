"""The blocks of keys that an indexer chooses for a query at position t (MiniMax-M3 and Qwen4, 2026):

    MiniMax-M3    s_n(j) = max over the positions p <= t of block j of q_n . k_p, for each head n
    Qwen4         s(j) = sum over n of relu(q_n . turned(norm(mean of the k_p of block j))) / sqrt(I),
                  of whole blocks up to t

q and k are float32. The first chooses `top_blocks` for the query heads of each KV head, the last
`local_blocks` up to the query's own always among them; the second, which is `pooled`, chooses `top_blocks`
for all heads, and the positions after the last whole block besides. A block turns as the first of its
positions does.

The first dimensions of a head turn by the rope of attention, however wide its own heads are.

Shapes: N heads of the indexer, I dimensions of a head, P positions, J blocks, C dimensions of a head of
attention.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.models.chosen_keys import chosen_keys
from compress.models.indexer import BlockIndexer
from compress.models.rope import rotate

Turned = Callable[[Tensor, Tensor], Tensor]
"""(means of the keys of blocks [..., J, I], the first positions of the blocks [J]) -> the keys of the blocks,
normed and turned."""


def rotate_first(x: Tensor, cos_C: Tensor, sin_C: Tensor, rotary_dim: int) -> Tensor:
    """Return heads x [..., S, H, I] whose first `rotary_dim` dimensions turn, half with half, by the cos and
    sin [..., S, C] of heads of attention."""
    half = rotary_dim // 2
    turning, still = x.split([rotary_dim, x.shape[-1] - rotary_dim], dim=-1)
    cos, sin = (torch.cat((each[..., :half], each[..., :half]), dim=-1) for each in (cos_C, sin_C))
    return torch.cat((rotate(turning, cos, sin), still), dim=-1)


def keys_of_blocks(facts: BlockIndexer, index_keys: Tensor, turned: Turned) -> Tensor:
    """Return the keys [..., J, I] of whole blocks of positions with index keys [..., P, I]; of the positions
    themselves [..., P, I] where blocks are not pooled. Sums over a block are made by halves, so that the bits
    of its key depend on its positions alone."""
    if not facts.pooled:
        return index_keys
    num_blocks = index_keys.shape[-2] // facts.block_size
    whole = index_keys[..., : num_blocks * facts.block_size, :].to(torch.float32)
    means = _sum(whole.unflatten(-2, (num_blocks, facts.block_size)), -2) / facts.block_size
    starts_J = torch.arange(num_blocks, device=index_keys.device) * facts.block_size
    return turned(means.to(index_keys.dtype), starts_J)


def chosen_blocks(facts: BlockIndexer, products: Tensor, positions: Tensor, num_positions: int) -> Tensor:
    """Return which of the J blocks of `num_positions` positions queries at `positions` [...] attend to, bool
    [..., N, J], or [..., 1, J] of a pooled indexer: the last one up to a query among them, whose later
    positions it does not see.

    Args:
        products: q . k of the queries with `keys_of_blocks` [..., N, P] or [..., N, J or less], float32.
    """
    query = positions.unsqueeze(-1).unsqueeze(-1)
    blocks_J = torch.arange(-(-num_positions // facts.block_size), device=products.device)
    last = last_block(facts, query)
    if facts.pooled:
        scores = _sum(torch.relu(products), -2).unsqueeze(-2) / facts.head_dim**0.5
        scores = F.pad(scores, (0, len(blocks_J) - scores.shape[-1]))
        return _best(scores, blocks_J < last, facts.top_blocks) | (blocks_J == last)
    scores = _largest(products, query, facts.block_size)
    is_local = (blocks_J <= last) & (blocks_J > last - facts.local_blocks)
    return _best(scores.masked_fill(is_local, torch.inf), blocks_J <= last, facts.top_blocks)


def num_attended(facts: BlockIndexer, positions: Tensor) -> Tensor:
    """Return how many positions of the chosen blocks queries at these positions see, their own included."""
    last = last_block(facts, positions)
    num_before = last.clamp(max=facts.top_blocks - (not facts.pooled))
    return num_before * facts.block_size + positions + 1 - last * facts.block_size


def last_block(facts: BlockIndexer, positions: Tensor) -> Tensor:
    """Return the last block up to a query, that of its position, or of a pooled indexer the one after all
    whole blocks, which has no position yet where there is nothing after them."""
    return (positions + 1 if facts.pooled else positions) // facts.block_size


def _best(scores: Tensor, seen: Tensor, count: int) -> Tensor:
    """Return which blocks [..., J] of those that a query sees have the largest scores."""
    return seen.expand_as(scores) if scores.shape[-1] <= count else chosen_keys(scores, seen, count)


def _largest(products: Tensor, query: Tensor, block_size: int) -> Tensor:
    """Return the largest product of each block [..., N, J] up to the position of the query."""
    positions_P = torch.arange(products.shape[-1], device=products.device)
    seen = products.masked_fill(positions_P > query, -torch.inf)
    whole = F.pad(seen, (0, -products.shape[-1] % block_size), value=-torch.inf)
    return whole.unflatten(-1, (-1, block_size)).amax(-1)


def _sum(x: Tensor, dim: int) -> Tensor:
    """Return the sums over an axis, by halves."""
    while x.shape[dim] > 1:
        size = x.shape[dim]
        halves = x.narrow(dim, 0, size // 2) + x.narrow(dim, size - size // 2, size // 2)
        x = torch.cat((halves, x.narrow(dim, size // 2, 1)), dim=dim) if size % 2 else halves
    return x.squeeze(dim)
