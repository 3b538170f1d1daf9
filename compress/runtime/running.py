"""A run: decode steps of the same requests, one after the other, each of which may be launched before the last one's tokens are read."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from compress.runtime.scheduler import Generation


class Launched(Protocol):
    """What was launched and is to be read. After `wait`, and until two more steps were launched, the rest may be asked for."""

    def wait(self) -> None: ...

    def read(self) -> list[list[int]]:
        """Of each request the tokens that come out, or what is behind them, too, if it ends with one of them."""

    @property
    def logprobs(self) -> list[list[float]] | None:
        """Of these tokens, if anybody asked."""

    @property
    def logits(self) -> Tensor:
        """[R, Q, V] that they were chosen from, until the next step is launched."""


class Steps(Protocol):
    """Decode steps over one state, plain or speculative. `runs_ahead`: a step may be launched before the last one is read."""

    @property
    def runs_ahead(self) -> bool: ...

    def load(self, generations: Sequence[Generation]) -> None:
        """Begin with these requests; every earlier step has been waited for."""

    def launch(self) -> Launched:
        """The next step."""

    def make_ready(self) -> bool:
        """For one more step, the last one launched not being read, but all before it: the blocks that it may need. False where some request
        has all its tokens then, or no block is free."""


class Run:
    """Begins with one step launched."""

    def __init__(self, steps: Steps, generations: Sequence[Generation]) -> None:
        self.generations = generations
        self._steps = steps
        self._ended = False
        steps.load(generations)
        self._launched = deque([steps.launch()])

    def launch_next(self) -> bool:
        """One step more, before the last one is read. False where the same requests do not go on for certain."""
        if self._ended or not self._steps.make_ready():
            return False
        self._launched.append(self._steps.launch())
        return True

    def oldest(self) -> Launched:
        """The step that is to be read next."""
        return self._launched.popleft()

    def end(self) -> None:
        """No further step: a request has ended, and the one that may be on its way serves it once more than needed."""
        self._ended = True
