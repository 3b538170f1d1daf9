"""The pools of positions that an indexer of latent attention chooses (GLM-5.3, 2026):

    K_j = sum_i a_i k_i,    a_i = softmax over i of (G x_i + b_i), for each number of a key
    s_tj = sum_h w_th relu(q_th K_j)

over the n positions i of pool j, whose places have the b_i; the first pool begins with the first position. A
query attends to the `top_pools` pools with the largest scores among those that are over at its position, its
own included, and to the positions after the last of these. All of it is float32.

Shapes: S queries, P positions, J pools, n positions of a pool, I numbers of a key.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.models.chosen_keys import chosen_keys
from compress.models.compressed import averages
from compress.models.hyper_connection import Elementwise, as_torch_does
from compress.models.indexer import Indexer


def pool_keys(
    keys_PI: Tensor, gates_PI: Tensor, positions_nI: Tensor, computed: Elementwise = as_torch_does
) -> Tensor:
    """Return the keys [..., J, I] of whole pools, float32, of the keys of positions [..., P, I], of their G x
    [..., P, I], and of the parameters b. Sums are made by halves, so that the bits of a pool depend on its
    positions alone."""
    size = len(positions_nI)
    num_pools = keys_PI.shape[-2] // size
    keys, gates = (
        each[..., : num_pools * size, :].to(torch.float32).unflatten(-2, (num_pools, size))
        for each in (keys_PI, gates_PI)
    )
    return averages(keys, gates + positions_nI.to(torch.float32), computed)


def chosen_in_pools(facts: Indexer, scores: Tensor, ends: Tensor, num_positions: int) -> Tensor:
    """Return which of so many positions queries attend to, bool [..., S, P], by the scores of pools
    [..., S, J or more]; `ends` [S] are the positions that queries see, their own included."""
    num_pools = num_positions // facts.pool_size
    over = (ends // facts.pool_size).unsqueeze(-1)
    pools_J = torch.arange(num_pools, device=scores.device)
    scores = scores[..., :num_pools]
    is_over = (pools_J < over).expand_as(scores)
    chosen = is_over if num_pools <= facts.top_pools else chosen_keys(scores, is_over, facts.top_pools)
    of_pools = chosen.repeat_interleave(facts.pool_size, dim=-1)
    of_pools = F.pad(of_pools, (0, num_positions - of_pools.shape[-1]))
    positions_P = torch.arange(num_positions, device=scores.device)
    return of_pools | ((positions_P >= over * facts.pool_size) & (positions_P < ends.unsqueeze(-1)))
