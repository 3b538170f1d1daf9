"""The facts of multi-head latent attention (arXiv 2405.04434): queries, keys and values are linears of normed
latents, which are narrower than all heads.

    q = q_up(norm(q_down(x))),    or q(x) without a latent of queries
    k, v = kv_up(norm(c)),        c, r = kv_down(x)

Each head of q and k has dimensions that do not rotate, and after them `rope_dim` that do; those of the keys
are r, the same in all heads. Where latents are `gated`, `q_up` computes the gates of the outputs of a head
after its query, and reads the latent once normed and once as it is (A.X K2):

    q, g = q_up(norm(c'), c'),  c' = q_down(x),   and attention returns sigmoid(g) times the values

A layer may attend to c and r of an earlier one (`LayerShape.kv_source`), by a
`kv_up` of its own.

Shapes: H heads, C head dimension, N = C - `rope_dim`, V value dimension.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.models.indexer import Indexer
from compress.untrusted.fields import Fields

LATENT_EPS = 1e-6
"""The norms of latents add this to the mean square in most families, whatever the other norms of a model add:
the published code of the models and `transformers` leave it at this default."""
Q_LATENT = "q_latent"
KV_LATENT = "kv_latent"
"""The taps of what `attn.q_up` and `attn.kv_up` read."""
Q_NORM = "attn.q_latent_norm"
KV_NORM = "attn.kv_latent_norm"
ROPE_NORM = "attn.rope_norm"
"""The norms of latents, and of the dimensions that all keys share."""
ABSORBED_GROUP = "kv_up"
"""The linear group that the runtime absorbs and multiplies by in 16 bits, whatever its scheme."""
MAX_RANK = 1 << 24


@dataclass(frozen=True)
class Latent:
    """The latents of one layer.

    Args:
        q_rank: width of the latent of queries; 0 where there is none and `attn.q` reads the input of
            attention.
        kv_rank: width of the latent of keys and values.
        rope_dim: dimensions of a head that rotate, or that all keys share where none does; 0 for none.
        value_dim: dimensions of the values of a head, at most those of its keys.
        interleaved: neighbours rotate as a pair, and not dimensions half of `rope_dim` apart.
        indexer: what chooses the keys of a query, None where it attends to all, or where the layer before
            chooses them.
        gated: `attn.q_up` computes gates of the outputs of attention, too.
        rescaled: normed latents are multiplied by the root of the hidden size over their width.
        rope_norm: the dimensions that all keys share are normed before they rotate, by a weight for each.
    """

    q_rank: int
    kv_rank: int
    rope_dim: int
    value_dim: int
    interleaved: bool
    indexer: Indexer | None = None
    gated: bool = False
    rescaled: bool = False
    rope_norm: bool = False

    def scale_of(self, norm: str, hidden_size: int) -> float:
        """Return what the output of a norm (`norm_sizes`) is multiplied by."""
        widths = {Q_NORM: self.q_rank, KV_NORM: self.kv_rank}
        return math.sqrt(hidden_size / widths[norm]) if self.rescaled and norm in widths else 1.0

    def q_up_shape(self, num_heads: int, head_dim: int) -> tuple[int, int]:
        """Return [O, I] of `attn.q_up`."""
        if not self.gated:
            return num_heads * head_dim, self.q_rank
        return num_heads * (head_dim + self.value_dim), 2 * self.q_rank

    def split_gates(self, q: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """Return the queries [..., H C] and the outputs of the gates [..., H V] of those of `attn.q_up`
        [..., H (C + V)], where latents are gated."""
        heads = q.unflatten(-1, (-1, head_dim + self.value_dim))
        queries, gates = heads.split([head_dim, self.value_dim], dim=-1)
        return queries.flatten(-2), gates.flatten(-2)

    def paired(self, rotated: Tensor) -> Tensor:
        """Return dimensions that rotate [..., `rope_dim`] as two halves that turn with one another."""
        if not self.interleaved:
            return rotated
        return torch.cat((rotated[..., 0::2], rotated[..., 1::2]), dim=-1)

    def whole_heads(self, still: Tensor, rotated: Tensor) -> Tensor:
        """Return heads [..., C] in the order of the canonical rotation (`rope.py`), of the dimensions that do
        not rotate [..., N] and of those that do [..., `rope_dim`]."""
        if not self.rope_dim:
            return still
        halves = self.paired(rotated).chunk(2, -1)
        still_halves = still.chunk(2, -1)
        return torch.cat((halves[0], still_halves[0], halves[1], still_halves[1]), dim=-1)

    def queries(self, q: Tensor, head_dim: int) -> Tensor:
        """Return the queries [..., H, C] of the outputs of their linear [..., H C]."""
        heads = q.unflatten(-1, (-1, head_dim))
        return self.whole_heads(*heads.split([head_dim - self.rope_dim, self.rope_dim], dim=-1))

    def keys_values(self, kv: Tensor, rotated: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values [..., H, C] of the outputs of `attn.kv_up` [..., H (N + V)] and the
        dimensions that rotate [..., `rope_dim`]. Zeros fill the values up to C."""
        heads = kv.unflatten(-1, (-1, head_dim - self.rope_dim + self.value_dim))
        still, values = heads.split([head_dim - self.rope_dim, self.value_dim], dim=-1)
        shared = rotated.unsqueeze(-2).expand(*still.shape[:-1], self.rope_dim)
        return self.whole_heads(still, shared), F.pad(values, (0, head_dim - self.value_dim))

    def norm_sizes(self, *, reads_anothers: bool) -> dict[str, int]:
        """Return the norms of latents and of what keys share, by module, and how many numbers each spans;
        `reads_anothers`: those of keys and values are an earlier layer's."""
        sizes = {
            Q_NORM: self.q_rank,
            KV_NORM: 0 if reads_anothers else self.kv_rank,
            ROPE_NORM: self.rope_dim if self.rope_norm and not reads_anothers else 0,
        }
        return {name: size for name, size in sizes.items() if size}

    def to_json(self) -> dict[str, Any]:
        """Return the facts as a manifest stores them."""
        facts = dataclasses.asdict(self)
        for name in ("indexer", "gated", "rescaled", "rope_norm"):
            if not facts[name]:
                del facts[name]
        if self.indexer is not None:
            facts["indexer"] = self.indexer.to_json()
        return facts

    def dense_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters that no scheme quantizes, other than norms."""
        return {} if self.indexer is None else self.indexer.dense_shapes(hidden_size, self.q_rank)

    @property
    def cached_width(self) -> int:
        """The numbers of a position that a cache of latents holds."""
        return self.kv_rank + self.rope_dim

    @staticmethod
    def from_json(stored: Fields) -> "Latent":
        """Read what `to_json` wrote; `Fields` raises its error for a value that is missing, of another type
        or out of range."""
        return Latent(
            q_rank=stored.integer("q_rank", 0, MAX_RANK),
            kv_rank=stored.integer("kv_rank", 1, MAX_RANK),
            rope_dim=stored.integer("rope_dim", 0, MAX_RANK),
            value_dim=stored.integer("value_dim", 1, MAX_RANK),
            interleaved=stored.flag("interleaved"),
            indexer=Indexer.from_json(stored.fields("indexer")) if stored.has("indexer") else None,
            gated=stored.flag("gated", default=False),
            rescaled=stored.flag("rescaled", default=False),
            rope_norm=stored.flag("rope_norm", default=False),
        )
