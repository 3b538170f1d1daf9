"""The indexer of latent attention in the canonical decoder (`indexer.py` has its facts, `chosen_keys.py` the
arithmetic). Nothing is learned through a choice, so it is computed without gradients.

Shapes: B batch, S sequence, P positions, D hidden, R width of the latent of queries, H heads of the indexer,
I numbers of a key.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.models.chosen_keys import chosen_keys, index_scores
from compress.models.indexer import Indexer, IndexerParameters
from compress.models.key_pools import chosen_in_pools, pool_keys
from compress.models.layer_shape import Rope
from compress.models.query_growth import learned_growth
from compress.models.rope import cos_sin, rotate


class TokenIndexer(IndexerParameters):
    """An indexer that chooses positions; its dimensions rotate by the rope of the layer."""

    q: nn.Linear
    k: nn.Linear
    weights: nn.Linear
    q_norm: nn.LayerNorm
    k_norm: nn.LayerNorm
    growth_scale: Tensor
    growth_base: Tensor
    pool_gate: Tensor
    pool_positions: Tensor

    def __init__(self, facts: Indexer, rope: Rope | None, rope_dim: int, *, hidden_size: int, q_rank: int):
        super().__init__(facts.dense_shapes(hidden_size, q_rank))
        self.facts = facts
        self._rope = rope
        self._rope_dim = rope_dim

    @torch.no_grad()
    def keys(self, x_BSD: Tensor, positions: Tensor) -> Tensor:
        """Return the index keys [B, S, I] of the input of attention, normed and rotated, and with pools what
        the weights of positions are computed of [B, S, I], after them."""
        k_BSI = self._normed(self.k_norm, F.linear(x_BSD, self.k.weight.to(x_BSD.dtype)))
        if self.facts.pool_size:
            return torch.cat((k_BSI, F.linear(x_BSD, self.pool_gate.to(x_BSD.dtype))), dim=-1)
        return self._turned(k_BSI.unsqueeze(-2), positions).squeeze(-2)

    @torch.no_grad()
    def choice(
        self, x_BSD: Tensor, read_BSR: Tensor, positions: Tensor, keys_BPI: Tensor, seen_SP: Tensor
    ) -> Tensor | None:
        """Return which keys each query attends to, bool [B, 1, S, P], None where it attends to all that it
        sees. Queries of the indexer are computed of `read_BSR`: the normed latent of the queries of
        attention, or its input."""
        if keys_BPI.shape[1] <= self.facts.top_k:
            return None
        read_BSR = self._normed(self.q_norm, read_BSR) if self.facts.of_stream else read_BSR
        q_BSHI = F.linear(read_BSR, self.q.weight.to(read_BSR.dtype)).unflatten(-1, (-1, self.facts.head_dim))
        if self.facts.of_stream:
            growth_SH = learned_growth(self.growth_scale, self.growth_base, positions, q_BSHI.dtype)
            q_BSHI = q_BSHI * growth_SH.unsqueeze(-1)
        weights_BSH = F.linear(x_BSD.to(torch.float32), self.weights.weight.to(torch.float32))
        weights_BSH = weights_BSH * self.facts.score_scale
        if self.facts.pool_size:
            own_BPI, gates_BPI = keys_BPI.chunk(2, dim=-1)
            pools_BJI = pool_keys(own_BPI, gates_BPI, self.pool_positions)
            scores_BSJ = index_scores(q_BSHI, pools_BJI, weights_BSH)
            chosen_BSP = chosen_in_pools(self.facts, scores_BSJ, seen_SP.sum(dim=-1), keys_BPI.shape[1])
            return chosen_BSP.unsqueeze(1)
        scores_BSP = index_scores(self._turned(q_BSHI, positions), keys_BPI, weights_BSH)
        return chosen_keys(scores_BSP, seen_SP, self.facts.top_k).unsqueeze(1)

    def _normed(self, norm: nn.LayerNorm, x: Tensor) -> Tensor:
        weight, bias = (each.to(torch.float32) for each in (norm.weight, norm.bias))
        return F.layer_norm(x.to(torch.float32), x.shape[-1:], weight, bias, self.facts.norm_eps).to(x.dtype)

    def _turned(self, x_BSHI: Tensor, positions: Tensor) -> Tensor:
        if self._rope is None:
            return x_BSHI
        return turned(self.facts, x_BSHI, *cos_sin(self._rope, self._rope_dim, positions, x_BSHI.dtype))


def turned(facts: Indexer, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the queries or keys of an indexer [..., S, H, I] rotated by cos and sin [..., S, R]: first the
    dimensions that rotate, then the others."""
    sizes = [cos.shape[-1], x.shape[-1] - cos.shape[-1]]
    if facts.rope_last:
        still, turning = x.split(sizes[::-1], dim=-1)
    else:
        turning, still = x.split(sizes, dim=-1)
    if facts.interleaved:
        turning = torch.cat((turning[..., 0::2], turning[..., 1::2]), dim=-1)
    return torch.cat((rotate(turning, cos, sin), still), dim=-1)
