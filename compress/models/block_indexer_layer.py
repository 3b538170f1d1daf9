"""The indexer of blocks of a layer in the canonical decoder (`block_choice.py` has the arithmetic).

Shapes: B batch, S sequence, D hidden, N heads of the indexer, I dimensions of a head, P positions of a cache,
C dimensions of a head of attention, H heads of attention, F dimensions of all heads of the indexer.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.models.arch import Arch
from compress.models.attention import Choose
from compress.models.block_choice import chosen_blocks, keys_of_blocks, rotate_first
from compress.models.indexer import BlockIndexer, IndexerParameters
from compress.models.layer_shape import LayerShape
from compress.models.rope import cos_sin


class BlockIndexerLayer(IndexerParameters):
    """The parameters of an indexer of blocks, and what it computes."""

    q: nn.Linear
    k: nn.Linear

    def __init__(self, facts: BlockIndexer, arch: Arch, shape: LayerShape) -> None:
        super().__init__(facts.dense_shapes(arch.hidden_size))
        self.facts = facts
        self.arch = arch
        self.shape = shape

    @torch.no_grad()
    def forward(self, x_BSD: Tensor, positions: Tensor) -> tuple[Tensor, Choose]:
        """Return the index keys [B, S, I] of the input of attention, and the choice of keys for its queries,
        which have these positions [S]."""
        facts = self.facts
        q_BSF = F.linear(x_BSD, self.q.weight.to(x_BSD.dtype))
        q_BSNI = self._normed("q", q_BSF.unflatten(-1, (facts.num_heads, facts.head_dim)))
        q_BSNI = self._turned(q_BSNI, positions).to(torch.float32)
        k_BSI = F.linear(x_BSD, self.k.weight.to(x_BSD.dtype))
        k_BSI = k_BSI if facts.pooled else self._key(k_BSI, positions)

        @torch.no_grad()
        def choose(index_keys_BPI: Tensor, seen_SP: Tensor) -> Tensor | None:
            num_queries, num_positions = seen_SP.shape
            if num_positions <= facts.top_k:
                return None
            own_S = torch.arange(num_positions - num_queries, num_positions, device=seen_SP.device)
            keys_BXI = keys_of_blocks(facts, index_keys_BPI, self._key).to(torch.float32)
            products_BSNX = torch.matmul(q_BSNI, keys_BXI.mT.unsqueeze(1))
            chosen_BSNJ = chosen_blocks(facts, products_BSNX, own_S, num_positions)
            groups = self.shape.num_heads // chosen_BSNJ.shape[2] if chosen_BSNJ.shape[2] > 1 else 1
            chosen_BHSJ = chosen_BSNJ.transpose(1, 2).repeat_interleave(groups, dim=1)
            return chosen_BHSJ.repeat_interleave(facts.block_size, dim=-1)[..., :num_positions]

        return k_BSI, choose

    def _key(self, k_BSI: Tensor, positions: Tensor) -> Tensor:
        """Return index keys [B, S, I] after their norm, turned by positions [S]."""
        return self._turned(self._normed("k", k_BSI).unsqueeze(-2), positions).squeeze(-2)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        """Return the queries or the keys [..., I] after their norm."""
        weight = self.get_parameter(f"{name}_norm.weight")
        x_f32 = x.to(torch.float32)
        normed = x_f32 * torch.rsqrt(x_f32.square().mean(-1, keepdim=True) + self.arch.norm_eps)
        return (normed * (weight.to(torch.float32) + self.arch.norm_offset)).to(x.dtype)

    def _turned(self, x_BSNI: Tensor, positions: Tensor) -> Tensor:
        """Return heads whose first dimensions have turned by positions [S]."""
        angles = cos_sin(self.shape.rope, self.shape.head_dim, positions, x_BSNI.dtype)
        return rotate_first(x_BSNI, *angles, self.shape.turning_dim)
