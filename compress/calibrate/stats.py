"""Statistics of the inputs of linears: small, mergeable, and independent of how the samples were split over work.

Floating-point addition is not associative, so the order of summation is part of the definition: one product per sample, samples of a
virtual shard in order, shards by a fixed binary tree (`MergeTree`). One rank, four ranks, a resumed run or a smaller batch give the same
bits.

Shapes: T tokens of one sample, D features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

NUM_SHARDS = 8
"""Virtual shards of a calibration set; ranks own whole shards. More than one node's worth of GPUs, and a tree of depth 3."""


class Stat(Protocol):
    """A sum over samples. `update` sees all tokens of one sample at once; `merge` adds a later one into this one."""

    def update(self, x_TD: Tensor) -> None: ...

    def merge(self, other: Self) -> None: ...

    def rescale_(self, scale_D: Tensor) -> None: ...


StatFactory = Callable[[], Stat]
S = TypeVar("S", bound=Stat)


class SecondMoment:
    """E[x x^T], the Hessian of a linear's squared output error up to a factor of two (arXiv 2208.11811). Accumulated in float32.

    A bf16 input keeps its dtype into the product: products of two bf16 numbers are exact in float32, and the tensor cores add them there.
    """

    def __init__(self) -> None:
        self._sum_DD: Tensor | None = None
        self.num_tokens = 0

    def update(self, x_TD: Tensor) -> None:
        gram_DD = _gram(x_TD)
        self._sum_DD = gram_DD if self._sum_DD is None else self._sum_DD.add_(gram_DD)
        self.num_tokens += x_TD.shape[0]

    def merge(self, other: "SecondMoment") -> None:
        if other._sum_DD is not None:
            self._sum_DD = other._sum_DD if self._sum_DD is None else self._sum_DD.add_(other._sum_DD)
            self.num_tokens += other.num_tokens

    def rescale_(self, scale_D: Tensor) -> None:
        """Become the moment of x / s, after s was folded into whatever produces x."""
        assert self._sum_DD is not None
        self._sum_DD = self._sum_DD / (scale_D.unsqueeze(0) * scale_D.unsqueeze(1))

    def mean(self) -> Tensor:
        """float32 [D, D]."""
        assert self._sum_DD is not None
        return self._sum_DD / self.num_tokens


class AbsMean:
    """E|x| per feature, the activation magnitude of AWQ (arXiv 2306.00978)."""

    def __init__(self) -> None:
        self._sum_D: Tensor | None = None
        self.num_tokens = 0

    def update(self, x_TD: Tensor) -> None:
        total_D = torch.linalg.vector_norm(x_TD, ord=1, dim=0, dtype=torch.float32)
        self._sum_D = total_D if self._sum_D is None else self._sum_D.add_(total_D)
        self.num_tokens += x_TD.shape[0]

    def merge(self, other: "AbsMean") -> None:
        if other._sum_D is not None:
            self._sum_D = other._sum_D if self._sum_D is None else self._sum_D.add_(other._sum_D)
            self.num_tokens += other.num_tokens

    def rescale_(self, scale_D: Tensor) -> None:
        assert self._sum_D is not None
        self._sum_D = self._sum_D / scale_D

    def mean(self) -> Tensor:
        """float32 [D]."""
        assert self._sum_D is not None
        return self._sum_D / self.num_tokens


class AbsMax:
    """max |x| per feature: the range of a static activation scale."""

    def __init__(self) -> None:
        self._max_D: Tensor | None = None

    def update(self, x_TD: Tensor) -> None:
        max_D = torch.linalg.vector_norm(x_TD, ord=torch.inf, dim=0, dtype=torch.float32)
        self._max_D = max_D if self._max_D is None else torch.maximum(self._max_D, max_D)

    def merge(self, other: "AbsMax") -> None:
        if other._max_D is not None:
            self._max_D = other._max_D if self._max_D is None else torch.maximum(self._max_D, other._max_D)

    def rescale_(self, scale_D: Tensor) -> None:
        assert self._max_D is not None
        self._max_D = self._max_D / scale_D

    def max(self) -> Tensor:
        """float32 scalar, over all features."""
        assert self._max_D is not None
        return self._max_D.max()


@dataclass(frozen=True)
class Node(Generic[S]):
    """The sum of shards begin .. begin + num_shards - 1, a power of two of them."""

    begin: int
    num_shards: int
    stat: S


class MergeTree(Generic[S]):
    """Merges a fixed sequence of shards pairwise, as a binary counter does: at most log2(shards) + 1 statistics are alive.

    A tree over the shards from `first` on merges only what the tree over all shards merges too, so whoever computed the shards of a part,
    their nodes, joined in order, make the same sums.
    """

    def __init__(self, first: int = 0) -> None:
        self._next = first
        self._pending: list[Node[S]] = []

    def push(self, shard: S) -> None:
        """Add the next shard."""
        self.join(Node(self._next, 1, shard))

    def join(self, node: Node[S]) -> None:
        """Add the next node, of this tree or of another one over the same shards."""
        self._next = node.begin + node.num_shards
        while self._pending and self._pending[-1].num_shards == node.num_shards and self._pending[-1].begin % (2 * node.num_shards) == 0:
            earlier = self._pending.pop()
            earlier.stat.merge(node.stat)
            node = Node(earlier.begin, 2 * node.num_shards, earlier.stat)
        self._pending.append(node)

    def nodes(self) -> list[Node[S]]:
        """What is not merged yet, in order; the tree is empty afterwards."""
        pending, self._pending = self._pending, []
        return pending

    def root(self) -> S:
        """The sum of everything pushed; the tree is empty afterwards."""
        total = self._pending.pop().stat
        while self._pending:
            earlier = self._pending.pop().stat
            earlier.merge(total)
            total = earlier
        return total


def shard_bounds(num_samples: int) -> list[tuple[int, int]]:
    """Half-open sample ranges of the virtual shards; empty ones are left out."""
    edges = [num_samples * idx // NUM_SHARDS for idx in range(NUM_SHARDS + 1)]
    return [(begin, end) for begin, end in zip(edges, edges[1:], strict=False) if end > begin]


def _gram(x_TD: Tensor) -> Tensor:
    if x_TD.is_cuda and x_TD.dtype == torch.bfloat16:
        return torch.mm(x_TD.t(), x_TD, out_dtype=torch.float32)
    x_TD = x_TD.to(torch.float32)
    return x_TD.t() @ x_TD
