"""The facts of an indexer (DeepSeek sparse attention, arXiv 2512.02556): it reads the input of latent
attention and the latent of its queries, and chooses the keys that a query attends to, at most `top_k`. An
indexer `of_stream` computes its queries from the input of attention, too, normed (LayerNorm with a bias), and
they grow with the position as those of attention do (`Arch.learned_growth`). One with pools (GLM-5.3) chooses
whole pools of positions, by averages of their keys, and the positions after the last pool are always chosen.

Attention without latents may have an indexer that chooses blocks of keys (MiniMax-M3): each of its heads
chooses for the query heads of one KV head, and its queries and keys are linears of the input of attention,
normed like those of attention. In a `pooled` one (Qwen4) all heads choose for all query heads, the keys of a
block are averaged, and the positions after the last whole block are always chosen.
Compressed attention may have one that chooses entries (DeepSeek-V4).

Up to `top_k` positions every earlier key is among them, and attention is what it is without an indexer.
Beyond them they are computed: those of latent attention in `token_indexer.py`, of pools by `key_pools.py`,
those of blocks in `block_choice.py`, those of entries in `compressed_attention.py`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from compress.models.limits import MAX_POSITIONS, MAX_SIZE
from compress.untrusted.fields import Fields

_NORM_EPS = 1e-6
"""Added to the variance by the norms of most indexers."""
POOL_GATE = "attn.indexer.pool_gate"
POOL_POSITIONS = "attn.indexer.pool_positions"
"""The matrix that computes what the weights of a position in its pool are computed of, and what is added for
its place there; parameters of the indexer itself, whose names on disk end in no `.weight`."""
_ONES = ("norm.weight", "growth_base")
"""How the names of parameters end that are 1 where they change nothing."""


@dataclass(frozen=True)
class Indexer:
    """The widths of the indexer of one layer.

    Args:
        top_k: the most keys that it chooses for a query.
        of_stream: its queries are a linear of the normed input of attention.
        interleaved: neighbours rotate as a pair, and not dimensions half of those that rotate apart.
        rope_last: the dimensions that rotate are the last ones of a head, and not the first.
        norm_eps: what its norms add to the variance.
        pool_size: the positions of a pool. It is chosen by an average of their keys with learned weights
            (`key_pools.py`); 0 where each position is chosen by its own key. `top_k` counts the positions
            after the last whole pool, too.
    """

    matrices: ClassVar[tuple[str, ...]] = ("q", "k", "weights")
    """Its linears: those of its queries, of its keys, and of the weights of its heads."""
    num_heads: int
    head_dim: int
    top_k: int
    of_stream: bool = False
    interleaved: bool = False
    rope_last: bool = False
    norm_eps: float = _NORM_EPS
    pool_size: int = 0

    @property
    def cached_numbers(self) -> int:
        """The numbers of a position that a cache holds for it: its key, and after it what its weights in an
        average are computed of."""
        return 2 * self.head_dim if self.pool_size else self.head_dim

    @property
    def top_pools(self) -> int:
        """The most pools that it chooses for a query."""
        return self.top_k // self.pool_size

    def why_unfit(self) -> str | None:
        """Return why its widths do not fit one another, None where they do."""
        if self.pool_size and (self.top_k + 1) % self.pool_size:
            return (
                f"its indexer chooses {self.top_k} positions in pools of {self.pool_size}; they have to be "
                f"whole pools and {self.pool_size - 1} positions after the last."
            )
        if self.pool_size and self.top_k < self.pool_size:
            return f"its indexer chooses {self.top_k} positions, which is no pool of {self.pool_size}."
        return None

    def num_chosen(self, ends: Tensor) -> Tensor:
        """Return how many positions are chosen for queries that see `ends` positions, their own included."""
        if not self.pool_size:
            return ends.clamp(max=self.top_k)
        after_last = ends % self.pool_size
        return (ends - after_last).clamp(max=self.top_pools * self.pool_size) + after_last

    @property
    def score_scale(self) -> float:
        """The factor of the weights of its heads."""
        return float((self.num_heads * self.head_dim) ** -0.5)

    def dense_shapes(self, hidden_size: int, q_rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its parameters by their names in attention; `q_rank` is the width of the
        latent of queries."""
        own = {
            "attn.indexer.q_norm.weight": (hidden_size,),
            "attn.indexer.q_norm.bias": (hidden_size,),
            "attn.indexer.growth_scale": (self.num_heads,),
            "attn.indexer.growth_base": (self.num_heads,),
        }
        of_pools = {
            POOL_GATE: (self.head_dim, hidden_size),
            POOL_POSITIONS: (self.pool_size, self.head_dim),
        }
        return {
            "attn.indexer.q.weight": (
                self.num_heads * self.head_dim,
                hidden_size if self.of_stream else q_rank,
            ),
            "attn.indexer.k.weight": (self.head_dim, hidden_size),
            "attn.indexer.k_norm.weight": (self.head_dim,),
            "attn.indexer.k_norm.bias": (self.head_dim,),
            "attn.indexer.weights.weight": (self.num_heads, hidden_size),
            **(own if self.of_stream else {}),
            **(of_pools if self.pool_size else {}),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the facts as a manifest stores them."""
        facts = dataclasses.asdict(self)
        plain = {"interleaved": False, "rope_last": False, "norm_eps": _NORM_EPS, "pool_size": 0}
        for name, value in plain.items():
            if facts[name] == value:
                del facts[name]
        return facts

    @staticmethod
    def from_json(stored: Fields) -> "Indexer":
        """Read what `to_json` wrote; `Fields` raises its error for a value that is missing, of another type
        or out of range."""
        return Indexer(
            num_heads=stored.integer("num_heads", 1, MAX_SIZE),
            head_dim=stored.integer("head_dim", 1, MAX_SIZE),
            top_k=stored.integer("top_k", 1, MAX_POSITIONS),
            of_stream=stored.flag("of_stream", default=False),
            interleaved=stored.flag("interleaved", default=False),
            rope_last=stored.flag("rope_last", default=False),
            norm_eps=stored.number("norm_eps", 0, 1, default=_NORM_EPS),
            pool_size=stored.integer("pool_size", 0, MAX_POSITIONS, default=0),
        )


@dataclass(frozen=True)
class BlockIndexer:
    """The widths of the indexer of one layer whose attention has no latents.

    Args:
        num_heads: its heads, one for each KV head of the layer, or any number of a `pooled` one.
        block_size: the positions of a block, the first block beginning with the first position.
        top_blocks: the most blocks that it chooses for a query; of a `pooled` one the most whole blocks.
        pooled: the keys of a whole block are averaged.
        local_blocks: the last blocks up to the query's own that are always among them; those of a `pooled`
            one are the positions after the last whole block.
    """

    matrices: ClassVar[tuple[str, ...]] = ("q", "k")
    """Its linears; its heads have no weights."""
    num_heads: int
    head_dim: int
    block_size: int
    top_blocks: int
    pooled: bool = False
    local_blocks: int = 1

    @property
    def cached_numbers(self) -> int:
        """The numbers of a position that a cache holds for it."""
        return self.head_dim

    @property
    def top_k(self) -> int:
        """The positions up to which a query attends to every earlier one."""
        after_last = self.block_size - 1 if self.pooled else 0
        return self.block_size * self.top_blocks + after_last

    def dense_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its parameters by their names in attention."""
        return {
            "attn.indexer.q.weight": (self.num_heads * self.head_dim, hidden_size),
            "attn.indexer.k.weight": (self.head_dim, hidden_size),
            "attn.indexer.q_norm.weight": (self.head_dim,),
            "attn.indexer.k_norm.weight": (self.head_dim,),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the facts as a manifest stores them."""
        facts = dataclasses.asdict(self)
        if not self.pooled:
            del facts["pooled"]
        if self.local_blocks == 1:
            del facts["local_blocks"]
        return facts

    @staticmethod
    def from_json(stored: Fields) -> "BlockIndexer":
        """Read the facts as a manifest stores them, by their names; `Fields` raises its error for a value
        that is missing, of another type or out of range."""
        return BlockIndexer(
            num_heads=stored.integer("num_heads", 1, MAX_SIZE),
            head_dim=stored.integer("head_dim", 1, MAX_SIZE),
            block_size=stored.integer("block_size", 1, MAX_POSITIONS),
            top_blocks=stored.integer("top_blocks", 1, MAX_POSITIONS),
            pooled=stored.flag("pooled", default=False),
            local_blocks=stored.integer("local_blocks", 1, MAX_POSITIONS, default=1),
        )


@dataclass(frozen=True)
class EntryIndexer:
    """The widths of the indexer of one layer with compressed attention: it has a compressor of its own, of
    the same positions as the layer's, and chooses entries.

    Args:
        top_entries: the most entries that it chooses for a query.
        rate: the positions of an entry.
    """

    matrices: ClassVar[tuple[str, ...]] = ("q", "kv", "gate", "weights")
    """Its linears: those of its queries, of its compressor, and of the weights of its heads."""
    num_heads: int
    head_dim: int
    top_entries: int
    rate: int

    @property
    def top_k(self) -> int:
        """The positions up to which a query attends to every entry that it sees."""
        return self.top_entries * self.rate

    @property
    def cached_numbers(self) -> int:
        """The numbers of a position that a cache holds for it, after those of the layer: what its entries are
        computed of."""
        return 4 * self.head_dim

    @property
    def score_scale(self) -> float:
        """The factor of the weights of its heads."""
        return float((self.num_heads * self.head_dim) ** -0.5)

    def dense_shapes(self, hidden_size: int, q_rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its parameters by their names in attention; entries overlap, so that a
        position has two vectors for them."""
        return {
            "attn.indexer.q.weight": (self.num_heads * self.head_dim, q_rank),
            "attn.indexer.kv.weight": (2 * self.head_dim, hidden_size),
            "attn.indexer.gate.weight": (2 * self.head_dim, hidden_size),
            "attn.indexer.positions": (self.rate, 2 * self.head_dim),
            "attn.indexer.norm.weight": (self.head_dim,),
            "attn.indexer.weights.weight": (self.num_heads, hidden_size),
        }

    @staticmethod
    def from_json(stored: Fields) -> "EntryIndexer":
        """Read the facts as a manifest stores them, by their names; `Fields` raises its error for a value
        that is missing, of another type or out of range."""
        return EntryIndexer(
            num_heads=stored.integer("num_heads", 1, MAX_SIZE),
            head_dim=stored.integer("head_dim", 1, MAX_SIZE),
            top_entries=stored.integer("top_entries", 1, MAX_POSITIONS),
            rate=stored.integer("rate", 1, MAX_POSITIONS),
        )


class IndexerParameters(nn.Module):
    """The parameters of an indexer, which no training changes and no scheme quantizes."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            module, _, leaf = name.removeprefix("attn.indexer.").rpartition(".")
            if module and not hasattr(self, module):
                self.add_module(module, nn.Module())
            filled: Tensor = torch.ones(shape) if name.endswith(_ONES) else torch.zeros(shape)
            self.get_submodule(module).register_parameter(leaf, nn.Parameter(filled, requires_grad=False))


def train_all_but_indexers_(decoder: nn.Module) -> nn.Module:
    """Let training change every parameter of a decoder but those of its indexers; return the decoder."""
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(not f".{name}".rpartition(".attn.indexer.")[1])
    return decoder
