"""What a stage is handed besides its inputs: device, seed, scratch directory, progress, the other ranks, and the question whether to stop.

Passed as an argument, never global. Randomness comes only from `rng`, whose stream depends on the seed and a path of names, so that
adding a consumer does not move the numbers of another.
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
"""Virtual shards of a calibration set; ranks own whole shards. More than one node's worth of GPUs, and a tree of depth 3."""


class Progress(Protocol):
    """Where progress is shown; everything goes to stderr or a log, never to stdout."""

    def update(self, done: int, total: int, note: str) -> None: ...

    def say(self, text: str) -> None: ...


class SilentProgress:
    """Shows nothing (tests, library use)."""

    def update(self, done: int, total: int, note: str) -> None:
        del done, total, note

    def say(self, text: str) -> None:
        del text


class Ranks(Protocol):
    """The processes that work on one job together. What one of them asks of `broadcast` and `move`, all ask, in the same order.

    Values are scalars, tensors, lists, tuples, mappings, and objects with such attributes; tensors arrive on the receiver's own device.

    Raises:
        RankStopped: another rank failed, and says why.
        EnvironmentUnfit: another rank is gone, or silent for too long.
    """

    @property
    def rank(self) -> int:
        """0 leads: it alone writes files and talks."""

    @property
    def size(self) -> int: ...

    def summon(self, work: Mapping[str, Any]) -> None:
        """Rank 0 hands a piece of work, as JSON, to all others; those that wait for it take part in it from now on."""

    def broadcast(self, value: T, *, source: int = 0) -> T:
        """The value that `source` gave, on every rank."""

    def move(self, value: T | None, *, source: int, to: int) -> T | None:
        """The value that `source` gave, on the rank `to`; None everywhere else."""

    def add_up(self, tensors: "Sequence[torch.Tensor]") -> None:
        """Each tensor becomes, in place, its sum over all ranks: the same bits on every one."""


class OneRank:
    """Nobody else."""

    rank = 0
    size = 1

    def summon(self, work: Mapping[str, Any]) -> None:
        del work

    def broadcast(self, value: T, *, source: int = 0) -> T:
        del source
        return value

    def move(self, value: T | None, *, source: int, to: int) -> T | None:
        del source, to
        return value

    def add_up(self, tensors: "Sequence[torch.Tensor]") -> None:
        del tensors


def never() -> int | None:
    """Nobody asked to stop."""
    return None


@dataclass(frozen=True)
class Context:
    """`stop_signal` gives the number of the signal that asked this run to end, or None; `offline` forbids the network. `kept` is a
    directory for what several stages and runs may use again, under names that say its content; `scratch` goes with the stage."""

    device: str
    seed: int
    scratch: Path
    progress: Progress = field(default_factory=SilentProgress)
    stop_signal: Callable[[], int | None] = never
    offline: bool = False
    ranks: Ranks = field(default_factory=OneRank)
    kept: Path | None = None

    def rng(self, *path: str) -> "torch.Generator":
        """A CPU generator for one purpose, named by `path`."""
        import torch

        name = "/".join((str(self.seed), *path))
        return torch.Generator().manual_seed(
            int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
        )

    def boundary(self, done: int, total: int, note: str) -> None:
        """Called where the work so far is on disk: shows progress, and stops here if a signal asked for it.

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
