"""Statistics of the inputs of linears: small, mergeable, and independent of how the samples were split over work.

Floating-point addition is not associative, so the order of summation is part of the definition: one product per sample, samples of a
virtual shard in order, shards by a fixed binary tree (`MergeTree`). One rank, four ranks, a resumed run or a smaller batch give the same
bits.

Shapes: T tokens of one sample, D features.
"""

from collections.abc import Callable
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

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
        gram_DD = _product(x_TD, x_TD)
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


@runtime_checkable
class SourceStat(Stat, Protocol):
    """A statistic of an input beside what the source model has in its place; by `update` alone, the two are the same."""

    def update_beside(self, x_TD: Tensor, source_TD: Tensor) -> None: ...


class CrossMoment:
    """E[(x_source - x) x^T], how what is still missing from an input goes along with the input (arXiv 2504.02692). Float32 sums.

    Differences of bf16 inputs are rounded to bf16 for the tensor cores; those of numbers within a factor of two are exact.
    """

    def __init__(self) -> None:
        self._sum_DD: Tensor | None = None
        self.num_tokens = 0

    def update(self, x_TD: Tensor) -> None:
        self.update_beside(x_TD, x_TD)

    def update_beside(self, x_TD: Tensor, source_TD: Tensor) -> None:
        product_DD = _product(source_TD - x_TD, x_TD)
        self._sum_DD = product_DD if self._sum_DD is None else self._sum_DD.add_(product_DD)
        self.num_tokens += x_TD.shape[0]

    def merge(self, other: "CrossMoment") -> None:
        if other._sum_DD is not None:
            self._sum_DD = other._sum_DD if self._sum_DD is None else self._sum_DD.add_(other._sum_DD)
            self.num_tokens += other.num_tokens

    def rescale_(self, scale_D: Tensor) -> None:
        """Both inputs are divided by s: the source's model takes the same scale out of its weights."""
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


class MergeTree(Generic[S]):
    """Merges a fixed sequence of shards pairwise, as a binary counter does: at most log2(shards) + 1 statistics are alive."""

    def __init__(self) -> None:
        self._pending: list[tuple[int, S]] = []

    def push(self, shard: S) -> None:
        rank = 0
        while self._pending and self._pending[-1][0] == rank:
            _, earlier = self._pending.pop()
            earlier.merge(shard)
            shard, rank = earlier, rank + 1
        self._pending.append((rank, shard))

    def root(self) -> S:
        """The sum of everything pushed; the tree is empty afterwards."""
        _, total = self._pending.pop()
        while self._pending:
            _, earlier = self._pending.pop()
            earlier.merge(total)
            total = earlier
        return total


def shard_bounds(num_samples: int) -> list[tuple[int, int]]:
    """Half-open sample ranges of the virtual shards; empty ones are left out."""
    edges = [num_samples * idx // NUM_SHARDS for idx in range(NUM_SHARDS + 1)]
    return [(begin, end) for begin, end in zip(edges, edges[1:], strict=False) if end > begin]


def _product(a_TD: Tensor, b_TD: Tensor) -> Tensor:
    """a^T b, float32 [D, D]."""
    if a_TD.is_cuda and a_TD.dtype == torch.bfloat16:
        return torch.mm(a_TD.t(), b_TD, out_dtype=torch.float32)
    return a_TD.to(torch.float32).t() @ b_TD.to(torch.float32)
