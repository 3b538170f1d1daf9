"""What the inputs of a layer's linears look like over all samples: the statistics that passes read, in the fixed order of summation.

A rank observes the shards that are its own. The sums of a tap then meet on one rank, the one that compresses the linears behind the tap,
where the tree of merges is finished: it is the same tree whoever computed its parts (`stats.MergeTree`).

Shapes: N samples, B of them together, S sequence, T = B S tokens, D hidden.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compress.calibrate.kv import Forward
from compress.calibrate.room import Room, Samples
from compress.calibrate.stats import (
    InputStats,
    MergeTree,
    Node,
    SourceStat,
    Stat,
    StatFactory,
    shard_bounds,
)
from compress.context import OneRank, Ranks
from compress.models.arch import LinearGroup
from compress.models.attention import FullAttention
from compress.models.decoder import no_tap

Trees = dict[tuple[str, type[Stat]], MergeTree[Stat]]
"""(tap, type of the statistic) -> what is summed so far."""
Stats = dict[str, InputStats]
"""Tap -> statistics of the input that is read there."""
TokenWeights = Mapping[str, Tensor]
"""Tap -> how much each token counts in sums of squares, float32 [N, S], 1 on average; on the CPU."""


PIECE_TOKENS = 2048
"""So many tokens, or one sample, go through a layer together and make one product: a part of the order of summation. Fewer leave a GPU
waiting for launches and a CPU for weights; on a CPU more of them leave its cache."""


@dataclass(frozen=True)
class Shards:
    """Consecutive virtual shards of a calibration set: the index of the first, and half-open ranges of samples."""

    first: int
    bounds: tuple[tuple[int, int], ...]

    @property
    def samples(self) -> slice:
        return slice(self.bounds[0][0], self.bounds[-1][1]) if self.bounds else slice(0, 0)

    def pieces(self, seq_len: int) -> list[list[slice]]:
        """By shard: the samples that go through a layer together, among those of the rank."""
        step = max(1, PIECE_TOKENS // seq_len)
        start = self.samples.start
        edges = [[*range(begin - start, end - start, step), end - start] for begin, end in self.bounds]
        return [[slice(*pair) for pair in itertools.pairwise(each)] for each in edges]

    @staticmethod
    def of(num_samples: int, *, rank: int = 0, size: int = 1) -> "Shards":
        """Those of one rank; all together are those of one rank alone."""
        bounds = shard_bounds(num_samples)
        begin, end = (len(bounds) * each // size for each in (rank, rank + 1))
        return Shards(begin, tuple(bounds[begin:end]))


@dataclass(frozen=True)
class Flow:
    """A rank's samples on their way through the layers, those of the source beside them where a pass compares, and who computes what."""

    samples: Samples
    of_source: Samples | None
    shards: Shards
    room: Room
    ranks: Ranks

    @property
    def pieces(self) -> list[list[slice]]:
        """By shard, which samples go together."""
        return self.shards.pieces(self.samples.seq_len)


@dataclass(frozen=True)
class Stream:
    """Samples, what they go through, and the samples, which may be the same, that become what comes out."""

    forward: Forward
    samples: Samples
    into: Samples | None = None

    def send(self, piece: slice, room: Room) -> dict[str, Tensor]:
        """Some samples on their way; what their linears read, by tap."""
        taps: dict[str, Tensor] = {}
        y_BSD = room.attempt(
            lambda: forward(self.forward, self.samples[piece], taps.__setitem__), "observing a layer"
        )
        if self.into is not None:
            self.into[piece] = y_BSD
        return taps


def observe(layer: Forward, x_NSD: Tensor, factories: Sequence[StatFactory]) -> Stats:
    """Statistics of every tap over all samples."""
    samples = Samples.of(x_NSD)
    flow = Flow(samples, None, Shards.of(len(x_NSD)), Room(None, samples), OneRank())
    return together(observe_shards(Stream(layer, samples), factories, flow), OneRank())


def together(parts: Trees, ranks: Ranks) -> Stats:
    """The finished statistics of every tap, on every rank: for small ones."""
    own = [(tap, tree.nodes()) for (tap, _), tree in parts.items()]
    trees: Trees = {}
    for source in range(ranks.size):
        for tap, nodes in ranks.broadcast(own, source=source):
            for node in nodes:
                trees.setdefault((tap, type(node.stat)), MergeTree()).join(node)
    stats: Stats = {}
    for (tap, _), tree in trees.items():
        stats.setdefault(tap, InputStats()).add(tree.root())
    return stats


def observe_shards(
    stream: Stream,
    factories: Sequence[StatFactory],
    flow: Flow,
    source: Stream | None = None,
    weights: TokenWeights | None = None,
) -> Trees:
    """The sums over the shards of a rank. `source`, where given, is what the source model has in the place of the stream. `weights` are of
    all samples, by tap."""
    trees: Trees = {}
    first = flow.shards.samples.start
    for pieces in flow.pieces:
        shard: dict[tuple[str, type[Stat]], Stat] = {}
        for piece in pieces:
            beside = {} if source is None else source.send(piece, flow.room)
            for tap, x_BSD in stream.send(piece, flow.room).items():
                weights_BS = (
                    None if weights is None else weights[tap][first + piece.start : first + piece.stop]
                )
                rows = flow.room.attempt(
                    partial(_Rows.of, x_BSD, beside.get(tap), weights_BS), "observing a layer"
                )
                for factory in factories:
                    stat = factory()
                    stat = shard.setdefault((tap, type(stat)), stat)
                    flow.room.attempt(partial(rows.update, stat), "observing a layer")
        for key in list(shard):
            trees.setdefault(key, MergeTree(flow.shards.first)).push(shard.pop(key))
    return trees


@dataclass(frozen=True)
class _Rows:
    """Some samples at one tap, [T, D], beside what the source has there: as it is, and times the roots of the weights."""

    x_TD: Tensor
    source_TD: Tensor | None
    weighed_TD: Tensor
    weighed_source_TD: Tensor | None

    @staticmethod
    def of(x_BSD: Tensor, source_BSD: Tensor | None, weights_BS: Tensor | None) -> "_Rows":
        x_TD = x_BSD.flatten(0, -2)
        source_TD = None if source_BSD is None else source_BSD.flatten(0, -2)
        if weights_BS is None:
            return _Rows(x_TD, source_TD, x_TD, source_TD)
        roots_T1 = weights_BS.flatten().sqrt().to(x_TD).unsqueeze(1)
        return _Rows(x_TD, source_TD, x_TD * roots_T1, None if source_TD is None else source_TD * roots_T1)

    def update(self, stat: Stat) -> None:
        """Statistics allocate before they add, so that one that found no room can be tried again."""
        x_TD, source_TD = (
            (self.weighed_TD, self.weighed_source_TD) if stat.of_squares else (self.x_TD, self.source_TD)
        )
        if isinstance(stat, SourceStat) and source_TD is not None:
            stat.update_beside(x_TD, source_TD)
        else:
            stat.update(x_TD)


def meet(
    trees: Trees,
    groups: Sequence[LinearGroup],
    kinds: Sequence[type[Stat]],
    owners: Mapping[str, int],
    ranks: Ranks,
) -> Stats:
    """The finished statistics of the taps that this rank owns; `owners` is tap -> rank."""
    stats: Stats = {}
    for group in groups:
        owner = owners[group.tap]
        for kind in kinds:
            tree = trees.pop((group.tap, kind), MergeTree[Stat]())
            whole = MergeTree[Stat]()
            for source in range(ranks.size):
                nodes: list[Node[Stat]] | None = tree.nodes() if ranks.rank == source else None
                for node in ranks.move(nodes, source=source, to=owner) or ():
                    whole.join(node)
            if ranks.rank == owner:
                stats.setdefault(group.tap, InputStats()).add(whole.root())
    return stats


def replay_(layer: Forward, samples: Samples, flow: Flow) -> None:
    """Samples of a flow become what the layer makes of them."""
    for piece in itertools.chain(*flow.pieces):
        samples[piece] = flow.room.attempt(
            lambda piece=piece: forward(layer, samples[piece], no_tap), "replaying a layer"
        )


@torch.no_grad()
def forward(layer: Forward, x_BSD: Tensor, tap: Callable[[str, Tensor], None]) -> Tensor:
    return layer(x_BSD, torch.arange(x_BSD.shape[1], device=x_BSD.device), FullAttention(), tap)
