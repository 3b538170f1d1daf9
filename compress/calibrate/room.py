"""What gives way when a device has no memory left: things that cost time and change no bit.

First the activations of the calibration set go to pinned host memory and come back a piece at a time; then linears that are compressed as
one matrix are compressed one by one, since rows are independent. A piece stays whole (`observe.py`): its product is the unit of every sum.
When nothing is left to give way, the run ends with a sentence, at a layer from which it resumes.

Shapes: N samples, S sequence, D hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from compress.context import Progress, SilentProgress
from compress.errors import EnvironmentUnfit

T = TypeVar("T")
CPU_STACK = 1 << 22
"""Weights of a stack of linears that a CPU compresses at once."""


def rounds_as_one(num_weights: int, *, on_cpu: bool) -> bool:
    """Whether linears over one input are compressed as one matrix from the start: not on a CPU when they are large, because there what
    rounding takes beside a layer would be most of the memory, and stacking saves little time."""
    return not on_cpu or num_weights <= CPU_STACK


class Samples:
    """The activations [N, S, D] of a rank's samples between two layers; some of them come as [B, S, D] on the device."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, on_host: bool = False
    ) -> None:
        self._device = device
        self.on_host = on_host
        if not on_host:
            try:
                self._x_NSD = torch.empty(*shape, dtype=dtype, device=device)
            except torch.OutOfMemoryError:
                self.on_host = True
        if self.on_host:
            self._x_NSD = torch.empty(*shape, dtype=dtype, pin_memory=device.type == "cuda")

    @staticmethod
    def of(x_NSD: Tensor) -> "Samples":
        samples = Samples(x_NSD.shape, x_NSD.dtype, x_NSD.device)
        samples._x_NSD.copy_(x_NSD)
        return samples

    def like(self, width: int) -> "Samples":
        """A place for as many, of another width, on the host if these are."""
        return Samples((*self._x_NSD.shape[:2], width), self._x_NSD.dtype, self._device, on_host=self.on_host)

    def copy(self) -> "Samples":
        """The same numbers in a place of their own."""
        other = Samples(self._x_NSD.shape, self._x_NSD.dtype, self._device)
        other._x_NSD.copy_(self._x_NSD)
        return other

    @property
    def seq_len(self) -> int:
        return self._x_NSD.shape[1]

    def __getitem__(self, some: slice) -> Tensor:
        return self._x_NSD[some].to(self._device, non_blocking=True)

    def __setitem__(self, some: slice, x_BSD: Tensor) -> None:
        self._x_NSD[some] = x_BSD.to(self._x_NSD.dtype)

    def retreat(self) -> bool:
        """Move to the host; False if they are there."""
        if self.on_host:
            return False
        host_NSD = torch.empty(
            self._x_NSD.shape, dtype=self._x_NSD.dtype, pin_memory=self._device.type == "cuda"
        )
        self._x_NSD = host_NSD.copy_(self._x_NSD)
        self.on_host = True
        return True


class Room:
    """Tries work again with more room, or in smaller pieces."""

    def __init__(self, progress: Progress | None = None, *samples: Samples) -> None:
        self._progress = progress or SilentProgress()
        self._samples = list(samples)

    @contextmanager
    def beside(self, samples: Samples) -> Iterator[Samples]:
        """For as long as they are there, these give way too."""
        self._samples.append(samples)
        try:
            yield samples
        finally:
            self._samples.remove(samples)

    def attempt(self, work: Callable[[], T], what: str, *, smaller: Callable[[], T] | None = None) -> T:
        """The result of `work`, which must be safe to begin again; when nothing else helps, that of `smaller`.

        Raises:
            EnvironmentUnfit: there is no room for it, whatever gives way.
        """
        while True:
            try:
                return work()
            except torch.OutOfMemoryError as error:
                reason = str(error).strip().partition("\n")[0]
            if (
                torch.cuda.is_available()
            ):  # outside of the handler, whose traceback holds what was being computed
                torch.cuda.empty_cache()
            retreated = [each.retreat() for each in self._samples]
            if any(retreated):
                self._progress.say(f"out of memory {what}: the activations go to host memory")
            elif smaller is not None:
                self._progress.say(f"out of memory {what}: one linear at a time")
                return smaller()
            else:
                raise EnvironmentUnfit(
                    f"out of memory {what}, and nothing is left to give way ({reason}). Free the device of other work, use a larger one, "
                    "or calibrate on a smaller seq_len; the same command resumes at the last layer that is stored."
                )
