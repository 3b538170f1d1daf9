"""The facts and the arithmetic of compressed attention (DeepSeek-V4): all query heads attend to one vector of
each position near, its key and its value, and to one entry of each `rate` positions anywhere before.

    q = turned(unit_norm(q_up(norm(q_down(x)))))      k = turned(norm(kv(x))), the value, too
    entry e = turned(norm(sum_j w_j c_j)),            w = softmax over j of (g_j + b_j), for each channel
    o(o_down(turned back(attention)))

A position has c and g from two linears of x, the compressor, and b is a parameter for each place among the
`rate` positions. Where entries overlap, c and g are two vectors each: entry e sums the first ones of the
positions of entry e - 1, if there is one, and the second ones of its own. A query at position t sees the
positions of its window, t among them, and the entries that end at t or before. An entry turns as the first of
its positions does. What heads attend to turns back by the position of the query, because values are turned.
Each group of heads has an `o_down` of its own, and `o` reads the outputs of all.

Dimensions that rotate are the last of a head, and neighbours rotate as a pair.

Shapes: P positions, E entries, F numbers of a position that a compressor computes, C head dimension, R its
dimensions that rotate, H heads, S sequence.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.models.hyper_connection import Elementwise, as_torch_does
from compress.models.indexer import EntryIndexer
from compress.models.limits import MAX_POSITIONS, MAX_SIZE
from compress.untrusted.fields import Fields

OUT_TAP = "o_in"
"""The taps of what the groups of heads attend to begin so, `o_in.3`."""
COMPRESSOR = ("attn.compressor.kv", "attn.compressor.gate")
"""The linears of a compressor, which no scheme quantizes."""
POSITIONS = "attn.compressor.positions"
"""The parameter b of a compressor."""


@dataclass(frozen=True)
class Compressed:
    """The facts of the compressed attention of one layer.

    Args:
        q_rank: width of the latent of queries.
        rope_dim: dimensions of a head that rotate.
        out_groups: groups of heads with an `o_down` each.
        out_rank: width of the outputs of one `o_down`.
        rate: positions of an entry; 0 in layers without entries.
        overlaps: entries read the positions of the entry before, too.
        indexer: what chooses the entries of a query, None where it attends to all.
    """

    q_rank: int
    rope_dim: int
    out_groups: int
    out_rank: int
    rate: int = 0
    overlaps: bool = False
    indexer: EntryIndexer | None = None

    def raw_width(self, head_dim: int) -> int:
        """Return F, the numbers of a position that entries of so many dimensions are computed of."""
        return 2 * self.num_series * head_dim

    @property
    def index_widths(self) -> tuple[int, int]:
        """The heads and the numbers of a key of the indexer, zeros without one."""
        return (0, 0) if self.indexer is None else (self.indexer.num_heads, self.indexer.head_dim)

    @property
    def num_series(self) -> int:
        """The vectors c of a position."""
        return (1 + self.overlaps) if self.rate else 0

    @property
    def out_linears(self) -> tuple[str, ...]:
        """The linears of the groups of heads."""
        return tuple(f"attn.o_down.{idx}" for idx in range(self.out_groups))

    def linear_shapes(self, hidden_size: int, num_heads: int, head_dim: int) -> dict[str, tuple[int, int]]:
        """Return [O, I] of the linears, by their names."""
        of_group = num_heads // self.out_groups * head_dim
        return {
            "attn.q_down": (self.q_rank, hidden_size),
            "attn.kv": (head_dim, hidden_size),
            "attn.q_up": (num_heads * head_dim, self.q_rank),
            **dict.fromkeys(self.out_linears, (self.out_rank, of_group)),
            "attn.o": (hidden_size, self.out_groups * self.out_rank),
        }

    def dense_shapes(self, hidden_size: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters that no scheme quantizes, other than norms of the layer's own
        queries and keys, and sinks."""
        if not self.rate:
            return {}
        width = self.num_series * head_dim
        shapes: dict[str, tuple[int, ...]] = {
            **{f"{linear}.weight": (width, hidden_size) for linear in COMPRESSOR},
            POSITIONS: (self.rate, width),
            "attn.compressor.norm.weight": (head_dim,),
        }
        return (
            shapes if self.indexer is None else shapes | self.indexer.dense_shapes(hidden_size, self.q_rank)
        )

    def to_json(self) -> dict[str, Any]:
        """Return the facts as a manifest stores them."""
        facts = dataclasses.asdict(self)
        if self.indexer is None:
            del facts["indexer"]
        return facts

    @staticmethod
    def from_json(stored: Fields) -> "Compressed":
        """Read what `to_json` wrote; `Fields` raises its error for a value that is missing, of another type
        or out of range."""
        return Compressed(
            q_rank=stored.integer("q_rank", 1, MAX_SIZE),
            rope_dim=stored.integer("rope_dim", 2, MAX_SIZE),
            out_groups=stored.integer("out_groups", 1, MAX_SIZE),
            out_rank=stored.integer("out_rank", 1, MAX_SIZE),
            rate=stored.integer("rate", 0, MAX_POSITIONS),
            overlaps=stored.flag("overlaps"),
            indexer=EntryIndexer.from_json(stored.fields("indexer")) if stored.has("indexer") else None,
        )


def entries(
    facts: Compressed, raw_PF: Tensor, positions: Tensor, computed: Elementwise = as_torch_does
) -> Tensor:
    """Return the entries [..., E, C] of whole groups of positions before their norm, float32, from what a
    compressor computes of the positions [..., P, F]. `positions` [`rate`, F / 2] is the parameter b. Sums
    over positions are made by halves, so that the bits of an entry depend on its positions alone."""
    num_entries = raw_PF.shape[-2] // facts.rate
    whole = raw_PF[..., : num_entries * facts.rate, :].to(torch.float32)
    kv, gate = whole.unflatten(-2, (num_entries, facts.rate)).chunk(2, dim=-1)
    gate = gate + positions.to(torch.float32)
    if facts.overlaps:
        kv = _with_those_before(kv, 0.0)
        gate = _with_those_before(gate, -torch.inf)
    return averages(kv, gate, computed)


def averages(x: Tensor, logits: Tensor, computed: Elementwise) -> Tensor:
    """Return the sums [..., C] of float32 vectors x [..., P, C], each number times the softmax over P of its
    logits; they are made by halves."""
    below_0 = logits - logits.detach().amax(-2, keepdim=True)
    weights = computed(torch.exp, below_0.flatten(0, -2)).view(below_0.shape)
    return sum_by_halves(weights * x) / sum_by_halves(weights)


def _with_those_before(x: Tensor, filler: float) -> Tensor:
    """Return the first vectors of the positions of the entry before, and the second ones of an entry's own
    [..., E, 2 `rate`, C]."""
    first, second = x.chunk(2, dim=-1)
    before = F.pad(first, (0, 0, 0, 0, 1, 0), value=filler)[..., :-1, :, :]
    return torch.cat((before, second), dim=-2)


def sum_by_halves(x: Tensor) -> Tensor:
    """Return the sums over the last axis but one [..., C]."""
    while x.shape[-2] > 1:
        x = F.pad(x, (0, 0, 0, x.shape[-2] % 2))
        first, second = x.chunk(2, dim=-2)
        x = first + second
    return x.squeeze(-2)


def turned(x: Tensor, cos_sin_SR: tuple[Tensor, Tensor], *, back: bool = False) -> Tensor:
    """Return heads x [..., S, H, C] with their last dimensions rotated by cos and sin [S, R], or `back`, in
    float32 and rounded once."""
    size = cos_sin_SR[0].shape[-1]
    cos, sin = (each[..., : size // 2].unsqueeze(-2).to(torch.float32) for each in cos_sin_SR)
    still, turning = x.split([x.shape[-1] - size, size], dim=-1)
    even, odd = (turning[..., idx::2].to(torch.float32) for idx in (0, 1))
    sin = -sin if back else sin
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((still, rotated.to(x.dtype)), dim=-1)
