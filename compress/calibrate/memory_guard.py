"""Recovery when a device runs out of memory: work is tried again after steps that cost time and change no
bit.

First the activations of the calibration set move to pinned host memory, from which each piece is copied when
it is needed. Then linears that are compressed as one stacked matrix are compressed one by one; rows are
independent, so the codes are the same. A piece of samples is never split (`layer_run.py`), because its
product is the unit of every sum. If all that is not enough, the run ends with an error and resumes at the
last stored layer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from compress.calibrate.samples import Samples
from compress.context import Progress, SilentProgress
from compress.errors import EnvironmentUnfit

T = TypeVar("T")
CPU_STACK = 1 << 22
"""Largest number of weights of a stack of linears that a CPU compresses as one matrix."""


def rounds_as_one(num_weights: int, *, on_cpu: bool) -> bool:
    """Return whether linears that read one input are compressed as one stacked matrix from the start.

    On a CPU large ones are not: the copies that rounding makes of the stack would be most of the memory, and
    stacking saves little time there.
    """
    return not on_cpu or num_weights <= CPU_STACK


class MemoryGuard:
    """Tries work again after an out-of-memory error, with more free memory or in smaller parts."""

    def __init__(self, progress: Progress | None = None, *samples: Samples) -> None:
        self._progress = progress or SilentProgress()
        self._samples = list(samples)

    @contextmanager
    def also_evict(self, samples: Samples) -> Iterator[Samples]:
        """Move `samples` to the host, too, when memory runs out within the block."""
        self._samples.append(samples)
        try:
            yield samples
        finally:
            self._samples.remove(samples)

    def retry_on_oom(self, work: Callable[[], T], task: str, *, smaller: Callable[[], T] | None = None) -> T:
        """Return the result of `work`, or of `smaller` when `work` does not fit even with all samples on the
        host.

        Args:
            work: must be safe to start again after it failed.
            task: what `work` does, for messages: "observing a layer".

        Raises:
            EnvironmentUnfit: it does not fit, and there is no `smaller`.
        """
        while True:
            try:
                return work()
            except torch.OutOfMemoryError as error:
                reason = str(error).strip().partition("\n")[0]
            # Outside of the handler, because its traceback keeps the failed work's tensors alive.
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            moved = [each.move_to_host() for each in self._samples]
            if any(moved):
                self._progress.log(f"out of memory {task}: the activations go to host memory")
            elif smaller is not None:
                self._progress.log(f"out of memory {task}: one linear at a time")
                return smaller()
            else:
                raise EnvironmentUnfit(
                    f"out of memory {task}, and nothing is left that could be moved to the host ({reason}). "
                    "Free the device of other work, use a larger one, or calibrate on a smaller seq_len; "
                    "the same command resumes at the last layer that is stored."
                )
