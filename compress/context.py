"""The context of a stage, besides its inputs: device, seed, scratch directory, progress, the other ranks, and
the stop signal.

It is passed as an argument and never global. Randomness comes only from `Context.rng`, whose stream depends
on the seed and a path of names, so a new consumer does not change the numbers of another.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from compress.errors import Interrupted

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
NUM_SHARDS = 8
"""Number of virtual shards of a calibration set; a rank owns whole shards. It is as many as one node has
GPUs, and gives a merge tree of depth 3."""


class Progress(Protocol):
    """An output for progress, to stderr or a log, never to stdout."""

    def update(self, done: int, total: int, note: str) -> None: ...

    def log(self, text: str) -> None: ...


class SilentProgress:
    """Progress that is not shown, for tests and use as a library."""

    def update(self, done: int, total: int, note: str) -> None:
        del done, total, note

    def log(self, text: str) -> None:
        del text


class Ranks(Protocol):
    """The processes that work on one job. All of them make the same collective calls (all but `dispatch`) in
    the same order.

    Values that are exchanged are None, bool, int, float, str, tensors, and lists, tuples and dicts of these;
    a received tensor lies on the receiver's own device.

    Raises:
        RankStopped: another rank failed; the error has its message.
        EnvironmentUnfit: another rank is gone, or has not answered for too long.
    """

    @property
    def rank(self) -> int:
        """Index of this process; rank 0 leads: it alone writes files and prints."""

    @property
    def size(self) -> int: ...

    def dispatch(self, work: Mapping[str, Any]) -> None:
        """Hand a piece of work, as JSON, from rank 0 to all other ranks, which wait for it."""

    def barrier(self) -> None:
        """Wait until every rank has called this."""

    def broadcast(self, value: T, *, source: int = 0) -> T:
        """Return, on every rank, the value that rank `source` passed."""

    def from_lead(self, make: Callable[[], T]) -> T:
        """Return, on every rank, what `make` returns on rank 0; other ranks do not call it."""

    def all_gather(self, value: T) -> list[T]:
        """Return, on every rank, the values that all ranks passed, in order of rank."""

    def send(self, value: T, *, source: int, to: int) -> T | None:
        """Return, on rank `to`, the value that rank `source` passed; None on every other rank."""

    def all_reduce(self, tensors: "Sequence[torch.Tensor]") -> None:
        """Replace each tensor, in place, by its sum over all ranks: the same bits on every rank."""


class OneRank:
    """A job of a single process."""

    rank = 0
    size = 1

    def dispatch(self, work: Mapping[str, Any]) -> None:
        del work

    def barrier(self) -> None:
        pass

    def broadcast(self, value: T, *, source: int = 0) -> T:
        del source
        return value

    def from_lead(self, make: Callable[[], T]) -> T:
        return make()

    def all_gather(self, value: T) -> list[T]:
        return [value]

    def send(self, value: T, *, source: int, to: int) -> T | None:
        del source, to
        return value

    def all_reduce(self, tensors: "Sequence[torch.Tensor]") -> None:
        del tensors


def never() -> int | None:
    """Return None: no signal asks this run to stop."""
    return None


@dataclass(frozen=True)
class Context:
    """The environment that every stage of a run receives.

    `stop_signal` returns the number of the signal that asked this run to end, or None. `offline` forbids the
    network. `kept` is a directory whose files several stages and runs may reuse, under names that identify
    their content; `scratch` is deleted when the stage is complete.
    """

    device: str
    seed: int
    scratch: Path
    progress: Progress = field(default_factory=SilentProgress)
    stop_signal: Callable[[], int | None] = never
    offline: bool = False
    ranks: Ranks = field(default_factory=OneRank)
    kept: Path | None = None

    def rng(self, *path: str) -> "torch.Generator":
        """Return a CPU generator for the purpose that `path` names."""
        import torch

        name = "/".join((str(self.seed), *path))
        return torch.Generator().manual_seed(
            int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
        )

    def boundary(self, done: int, total: int, note: str) -> None:
        """Show progress, and stop here if a signal asked for it; to be called where all work so far is on
        disk.

        Raises:
            Interrupted: with the signal's exit code; the same command resumes from this point.
        """
        self.progress.update(done, total, note)
        signal_number = self.stop_signal()
        if signal_number is not None:
            raise Interrupted(
                f"stopped at a safe point ({note}); the same command resumes here.",
                signal_number=signal_number,
            )
