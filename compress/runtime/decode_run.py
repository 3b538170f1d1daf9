"""A run of decode steps of the same requests, in which a step may be launched before the last one's tokens
are read.

`DecodeRun` launches steps of a `Decoding`, which is plain (`decode.py`) or speculative
(`speculative/decoding.py`). Both leave the results of a step in memory that the host reaches, in one of two
places in turn (`HostResults`). Where tokens that are not read yet belong to requests of the next run, it
takes them from where the device has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from compress.runtime.generation import Generation


@dataclass(frozen=True)
class HostResults:
    """The tensors in which the host finds the results of every other step, and the event that marks them
    complete.

    Without a CUDA device there is no event: results are complete at once.
    """

    tokens: Tensor
    logprobs: Tensor
    done: torch.cuda.Event | None

    def record(self) -> None:
        """Mark the results complete when the device has finished what was launched so far."""
        if self.done is not None:
            self.done.record()

    def wait(self) -> None:
        """Wait until the results are complete."""
        if self.done is not None:
            self.done.synchronize()


def host_results(tokens_2: Tensor, logprobs_2: Tensor, device: torch.device) -> list[HostResults]:
    """Return the two places for results; step n uses place n % 2."""
    on_cuda = device.type == "cuda"
    return [
        HostResults(tokens_2[idx], logprobs_2[idx], torch.cuda.Event() if on_cuda else None)
        for idx in range(2)
    ]


class PendingTokens(Protocol):
    """Tokens of a pass that was launched. They may be read after `wait`, until two more decode steps are
    launched.
    """

    def wait(self) -> None:
        """Wait until the device has chosen the tokens."""

    def read(self) -> list[list[int]]:
        """Return the new tokens of each request, which may go on after an end-of-sequence token."""

    @property
    def logprobs(self) -> list[list[float]] | None:
        """Log probabilities of these tokens, or None where no request wants them."""

    @property
    def logits(self) -> Tensor:
        """Logits [R, Q, V] that the tokens were chosen from, until the next step is launched."""


@dataclass(frozen=True)
class FirstTokens:
    """The first tokens of prompts on the device, int64 [W]: one for each of `generations`."""

    generations: Sequence[Generation]
    tokens_W: Tensor


class Decoding(Protocol):
    """A way to decode: it launches steps over one device state. `runs_ahead`: it may launch a step before the
    last one is read.
    """

    @property
    def runs_ahead(self) -> bool: ...

    def may_load_ahead(self, generations: Sequence[Generation]) -> bool:
        """Return whether a run of these requests may begin before the last step is read."""

    def load(self, generations: Sequence[Generation], firsts: FirstTokens | None = None) -> None:
        """Begin a run of steps of these requests. The caller has read every earlier step, or all but the last
        one where `may_load_ahead`; `firsts` are the first tokens that the last one chose.
        """

    def launch(self) -> PendingTokens:
        """Launch the next step."""

    def make_ready(self) -> bool:
        """Take the blocks that one more step may need, while the last step launched is not read yet.

        Returns False where the last step gives some request all its tokens, or where no block is free.
        """


class DecodeRun:
    """Consecutive decode steps of the same requests. It begins with the step `first`."""

    def __init__(
        self, decoding: Decoding, generations: Sequence[Generation], firsts: FirstTokens | None = None
    ) -> None:
        self.generations = generations
        self._decoding = decoding
        decoding.load(generations, firsts)
        self.first = decoding.launch()

    def launch_next(self) -> PendingTokens | None:
        """Launch one more step, where no request has all its tokens with the last one and each has a block
        for its next token; return None otherwise.
        """
        return self._decoding.launch() if self._decoding.make_ready() else None
