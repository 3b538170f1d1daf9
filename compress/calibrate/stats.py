"""Statistics of the inputs of linears: small, mergeable, and independent of how the samples were split over
work.

Floating-point addition is not associative, so the order of summation is part of the definition: one product
for each piece of a few samples (`layer_run.py`), pieces of a virtual shard in order, shards by a fixed binary
tree (`MergeTree`). One rank, four ranks and a resumed run give the same bits.

Shapes: T tokens of one piece, D features.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor

from compress.calibrate.arithmetic import add_gram, add_lower_gram

NOT_FINITE = (
    "the moments of a layer's inputs are not finite: the calibration data drives the model to NaN or "
    "infinity. Check the checkpoint, or compute in float32."
)
"""Message of the UsageError that a method raises when it cannot factorise a moment."""
BLOCK_ROWS = 256
"""Rows of one block of a compact sum."""


class Stat(Protocol):
    """A sum over samples.

    `update` adds all tokens of one piece at once. `merge` adds the sum of later samples and overwrites that
    sum. After `compact` only `merge` and reading follow. A statistic that `is_quadratic` can weigh tokens: it
    receives rows times the root of their weights. `complete_` adds the average of `target` for
    as many tokens as are missing to `num_tokens`.
    """

    @property
    def is_quadratic(self) -> bool: ...

    def update(self, x_TD: Tensor) -> None: ...

    def merge(self, other: Self) -> None: ...

    def compact(self) -> None: ...

    def rescale_(self, scale_D: Tensor) -> None: ...

    def complete_(self, target: Self, num_tokens: int) -> None: ...


StatFactory = Callable[[], Stat]
"""A function that returns an empty statistic; a statistic's class is one."""
S = TypeVar("S", bound=Stat)


class InputStats:
    """Statistics of the input of one linear group, at most one of each type: `stats[SecondMoment]`."""

    def __init__(self, *stats: Stat) -> None:
        self._by_type: dict[type[Stat], Stat] = {}
        for stat in stats:
            self.add(stat)

    def add(self, stat: Stat) -> None:
        """Hold `stat`, too, under its type."""
        self._by_type[type(stat)] = stat

    def get(self, kind: type[S]) -> S | None:
        """Return the statistic of type `kind`, None if it was not collected."""
        return cast(S | None, self._by_type.get(kind))

    def __getitem__(self, kind: type[S]) -> S:
        """Return the statistic of type `kind`.

        Raises:
            KeyError: it was not collected, because no `needs` names it.
        """
        return cast(S, self._by_type[kind])

    def __iter__(self) -> Iterator[Stat]:
        return iter(self._by_type.values())


class SecondMoment:
    """E[x x^T], the Hessian of a linear's squared output error up to a factor of two (arXiv 2208.11811),
    summed in float32.

    A bf16 input stays bf16 in the product: products of two bf16 numbers are exact in float32, and tensor
    cores add them in float32.
    """

    is_quadratic = True

    def __init__(self) -> None:
        self._sum_DD: Tensor | None = None
        self._lower: list[Tensor] = []  # of a compacted sum: blocks of rows up to the diagonal
        self._half = False  # whether the sum holds but these blocks, as a CPU computes them
        self.num_tokens = 0

    def update(self, x_TD: Tensor) -> None:
        if x_TD.is_cuda:
            self._sum_DD = add_gram(self._sum_DD, x_TD, x_TD)
        else:
            self._sum_DD = add_lower_gram(self._sum_DD, x_TD, BLOCK_ROWS)
            self._half = True
        self.num_tokens += x_TD.shape[0]

    def merge(self, other: "SecondMoment") -> None:
        """Add `other` and overwrite it. Whichever of the two is complete serves as the accumulator: a + b and
        b + a have the same bits."""
        if other.num_tokens == 0:
            return
        if self.num_tokens == 0:
            self._sum_DD = other._sum_DD
            self._lower = other._lower
            self._half = other._half
        elif self._lower:
            self._sum_DD = _plus_lower_(other._sum(), self._lower)
            self._lower = []
            self._half = other._half
        elif other._lower:
            self._sum_DD = _plus_lower_(self._sum(), other._lower)
        else:
            self._sum().add_(other._sum())
            self._half |= other._half
        self.num_tokens += other.num_tokens

    def compact(self) -> None:
        """Keep only one half of a sum that is symmetric bit for bit, as sums of x^T x are; waiting sums are
        most of a layer's memory. If there is no memory for a copy of the half, the sum stays complete."""
        with contextlib.suppress(torch.OutOfMemoryError):
            self._keep_half()

    def _keep_half(self) -> None:
        if self._sum_DD is not None and (self._half or torch.equal(self._sum_DD, self._sum_DD.t())):
            blocks = [rows[:, :end] for rows, end in _row_blocks(self._sum_DD)]
            flat = torch.cat(
                [block.reshape(-1) for block in blocks]
            )  # one piece of memory, given back as one
            parts = flat.split([block.numel() for block in blocks])
            self._lower = [part.view(block.shape) for part, block in zip(parts, blocks, strict=True)]
            self._sum_DD = None
            self._half = False

    def rescale_(self, scale_D: Tensor) -> None:
        """Replace the moment by that of x / s, after s was folded into the producer of x."""
        self._sum_DD = self._whole() / (scale_D.unsqueeze(0) * scale_D.unsqueeze(1))
        self._lower = []

    def complete_(self, target: Self, num_tokens: int) -> None:
        missing = num_tokens - self.num_tokens
        added_DD = target.mean() * missing
        self._sum_DD = added_DD.add_(self._whole()) if self.num_tokens else added_DD
        self._lower = []
        self._half = False
        self.num_tokens = num_tokens

    def mean(self) -> Tensor:
        """Return the moment, float32 [D, D]."""
        return self._whole() / self.num_tokens if not self._lower else self._whole().div_(self.num_tokens)

    def _whole(self) -> Tensor:
        """Return the complete sum; of a compact one a copy, and the sum stays compact."""
        if self._lower:
            return _whole_of(self._lower)
        if self._half:
            self._sum_DD = _whole_of([rows[:, :end] for rows, end in _row_blocks(self._sum())])
            self._half = False
        return self._sum()

    def _sum(self) -> Tensor:
        """Return the sum as it is kept; above the blocks on the diagonal it may be incomplete."""
        if self._lower:
            return self._whole()
        assert self._sum_DD is not None
        return self._sum_DD


@runtime_checkable
class SourceStat(Stat, Protocol):
    """A statistic that compares an input with the source model's input at the same tap; `update` alone takes
    both to be equal."""

    def update_with_source(self, x_TD: Tensor, source_TD: Tensor) -> None: ...


class CrossMoment:
    """E[(x_source - x) x^T], the correlation between the error of an input and the input (arXiv 2504.02692),
    summed in float32.

    Differences of bf16 inputs are rounded to bf16 for the tensor cores; differences of numbers within a
    factor of two are exact.
    """

    is_quadratic = True

    def __init__(self) -> None:
        self._sum_DD: Tensor | None = None
        self.num_tokens = 0

    def update(self, x_TD: Tensor) -> None:
        self.update_with_source(x_TD, x_TD)

    def update_with_source(self, x_TD: Tensor, source_TD: Tensor) -> None:
        self._sum_DD = add_gram(self._sum_DD, source_TD - x_TD, x_TD)
        self.num_tokens += x_TD.shape[0]

    def merge(self, other: "CrossMoment") -> None:
        if other._sum_DD is not None:
            self._sum_DD = other._sum_DD if self._sum_DD is None else self._sum_DD.add_(other._sum_DD)
            self.num_tokens += other.num_tokens

    def compact(self) -> None:
        """Keep the sum as it is, because it is not symmetric."""

    def rescale_(self, scale_D: Tensor) -> None:
        """Divide both inputs by s: the source's model folds the same scale into its weights."""
        assert self._sum_DD is not None
        self._sum_DD = self._sum_DD / (scale_D.unsqueeze(0) * scale_D.unsqueeze(1))

    def complete_(self, target: Self, num_tokens: int) -> None:
        added_DD = target.mean() * (num_tokens - self.num_tokens)
        self._sum_DD = added_DD if self._sum_DD is None else added_DD.add_(self._sum_DD)
        self.num_tokens = num_tokens

    def mean(self) -> Tensor:
        """Return the moment, float32 [D, D]."""
        assert self._sum_DD is not None
        return self._sum_DD / self.num_tokens


class Mean:
    """E[x] per feature, from which a bias makes up for a removed feature."""

    is_quadratic = False

    def __init__(self) -> None:
        self._sum_D: Tensor | None = None
        self.num_tokens = 0

    def update(self, x_TD: Tensor) -> None:
        total_D = self._total(x_TD)
        self._sum_D = total_D if self._sum_D is None else self._sum_D.add_(total_D)
        self.num_tokens += x_TD.shape[0]

    def merge(self, other: Self) -> None:
        if other._sum_D is not None:
            self._sum_D = other._sum_D if self._sum_D is None else self._sum_D.add_(other._sum_D)
            self.num_tokens += other.num_tokens

    def _total(self, x_TD: Tensor) -> Tensor:
        """Return the sum over tokens, float32 [D]."""
        return x_TD.sum(dim=0, dtype=torch.float32)

    def compact(self) -> None:
        """Keep the sum as it is, because it is small."""

    def rescale_(self, scale_D: Tensor) -> None:
        assert self._sum_D is not None
        self._sum_D = self._sum_D / scale_D

    def complete_(self, target: Self, num_tokens: int) -> None:
        added_D = target.mean() * (num_tokens - self.num_tokens)
        self._sum_D = added_D if self._sum_D is None else added_D.add_(self._sum_D)
        self.num_tokens = num_tokens

    def mean(self) -> Tensor:
        """Return the mean, float32 [D]."""
        assert self._sum_D is not None
        return self._sum_D / self.num_tokens


class AbsMean(Mean):
    """E|x| per feature, the activation magnitude of AWQ (arXiv 2306.00978)."""

    def _total(self, x_TD: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x_TD, ord=1, dim=0, dtype=torch.float32)


class AbsMax:
    """Largest |x| per feature: the range of a static activation scale."""

    is_quadratic = False

    def __init__(self) -> None:
        self._max_D: Tensor | None = None

    def update(self, x_TD: Tensor) -> None:
        max_D = torch.linalg.vector_norm(x_TD, ord=torch.inf, dim=0, dtype=torch.float32)
        self._max_D = max_D if self._max_D is None else torch.maximum(self._max_D, max_D)

    def merge(self, other: "AbsMax") -> None:
        if other._max_D is not None:
            self._max_D = other._max_D if self._max_D is None else torch.maximum(self._max_D, other._max_D)

    def compact(self) -> None:
        """Keep the values as they are, because they are small."""

    def rescale_(self, scale_D: Tensor) -> None:
        assert self._max_D is not None
        self._max_D = self._max_D / scale_D

    def complete_(self, target: "AbsMax", num_tokens: int) -> None:
        """Cover the range of `target`, too."""
        self.merge(target)

    def max(self) -> Tensor:
        """Return the largest value of all features, a float32 scalar."""
        return self.per_feature().max()

    def per_feature(self) -> Tensor:
        """Return the largest value of each feature, float32 [D]."""
        assert self._max_D is not None
        return self._max_D


class Range:
    """Least and largest x per feature: the range of an asymmetric static input."""

    is_quadratic = False

    def __init__(self) -> None:
        self._least_D: Tensor | None = None
        self._most_D: Tensor | None = None

    def update(self, x_TD: Tensor) -> None:
        least_D, most_D = torch.aminmax(x_TD.to(torch.float32), dim=0)
        self._cover(least_D, most_D)

    def merge(self, other: "Range") -> None:
        if other._least_D is not None and other._most_D is not None:
            self._cover(other._least_D, other._most_D)

    def compact(self) -> None:
        """Keep the values as they are, because they are small."""

    def rescale_(self, scale_D: Tensor) -> None:
        assert self._least_D is not None
        assert self._most_D is not None
        self._least_D = self._least_D / scale_D
        self._most_D = self._most_D / scale_D

    def complete_(self, target: "Range", num_tokens: int) -> None:
        """Cover the range of `target`, too."""
        self.merge(target)

    def whole(self) -> tuple[Tensor, Tensor]:
        """Return the least and the largest value of all features and zero, float32 scalars."""
        assert self._least_D is not None
        assert self._most_D is not None
        return self._least_D.min().clamp_max(0), self._most_D.max().clamp_min(0)

    def _cover(self, least_D: Tensor, most_D: Tensor) -> None:
        self._least_D = least_D if self._least_D is None else torch.minimum(self._least_D, least_D)
        self._most_D = most_D if self._most_D is None else torch.maximum(self._most_D, most_D)


@dataclass(frozen=True)
class Node(Generic[S]):
    """The sum of the shards begin .. begin + num_shards - 1; num_shards is a power of two."""

    begin: int
    num_shards: int
    stat: S

    def to_parts(self) -> tuple[int, int, dict[str, Any]]:
        """Return the node in the form that is sent between ranks. A statistic's attributes are numbers,
        tensors and lists of tensors."""
        return self.begin, self.num_shards, vars(self.stat)

    @staticmethod
    def from_parts(parts: tuple[int, int, dict[str, Any]], factory: Callable[[], S]) -> "Node[S]":
        """Return the node of these parts, whose statistic is of the kind that `factory` makes."""
        begin, num_shards, attributes = parts
        stat = factory()
        vars(stat).update(attributes)
        return Node(begin, num_shards, stat)


class MergeTree(Generic[S]):
    """Merges a fixed sequence of shards pairwise, like a binary counter: at most log2(shards) + 1 statistics
    are alive.

    A tree over some consecutive shards merges only what the tree over all shards merges, too, so the nodes of
    several ranks, joined in order, make the same sums as one rank does.
    """

    def __init__(self) -> None:
        self._pending: list[Node[S]] = []

    def push(self, shard_idx: int, stat: S) -> None:
        """Add the sum of one shard, in order of shards."""
        self.join(Node(shard_idx, 1, stat))

    def join(self, node: Node[S]) -> None:
        """Add the next node, of this tree or of another one over the same shards."""
        while (
            self._pending
            and self._pending[-1].num_shards == node.num_shards
            and self._pending[-1].begin % (2 * node.num_shards) == 0
        ):
            earlier = self._pending.pop()
            earlier.stat.merge(node.stat)
            node = Node(earlier.begin, 2 * node.num_shards, earlier.stat)
        node.stat.compact()
        self._pending.append(node)

    def nodes(self) -> list[Node[S]]:
        """Return the sums that are not merged yet, in order, and empty the tree."""
        pending = self._pending
        self._pending = []
        return pending

    def root(self) -> S:
        """Return the sum of everything pushed, and empty the tree."""
        total = self._pending.pop().stat
        while self._pending:
            earlier = self._pending.pop().stat
            earlier.merge(total)
            total = earlier
        total.compact()
        return total


def _row_blocks(sum_DD: Tensor) -> list[tuple[Tensor, int]]:
    """Return blocks of rows, each with the index after its last row."""
    return [
        (rows, min((idx + 1) * BLOCK_ROWS, len(sum_DD))) for idx, rows in enumerate(sum_DD.split(BLOCK_ROWS))
    ]


def _whole_of(lower: list[Tensor]) -> Tensor:
    """Return the symmetric matrix of these blocks of rows."""
    size = lower[-1].shape[1]
    return _plus_lower_(lower[0].new_zeros(size, size), lower)


def _plus_lower_(sum_DD: Tensor, lower: list[Tensor]) -> Tensor:
    """Add a compact sum, which is symmetric, to `sum_DD` in place and return it."""
    begin = 0
    for rows in lower:
        end = rows.shape[1]
        left = rows[:, :begin]
        diagonal = rows[:, begin:]
        sum_DD[begin:end, :begin] += left
        sum_DD[:begin, begin:end] += left.t()
        # Not every library's x^T x is symmetric bit for bit (MKL's AVX2 code): the lower triangle decides.
        sum_DD[begin:end, begin:end] += diagonal.tril() + diagonal.tril(-1).t()
        begin = end
    return sum_DD
