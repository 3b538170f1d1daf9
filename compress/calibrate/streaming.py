"""The two ends of a stream of layers: the next one is read while this one is worked on, and the last one is written meanwhile.

A reader thread holds one layer ahead at most, in pinned memory when it is to go to a GPU, where a copy from anywhere else would wait for
the host. A writer thread has one file in hand at most. What goes wrong in a thread is raised where its result is asked for.
"""

import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from compress.models.arch import Arch
from compress.models.weights import Weights
from compress.quant.scheme import QuantizedWeight

SMALL_LAYER = 1 << 24
"""Parameters of a layer up to which its memory may stay when it is freed."""
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


class _Thread:
    """One thread, ended with the block; what it has begun it finishes first."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)


class LayerPrefetcher(_Thread):
    """Reads layers before they are asked for. `read` runs in the thread; one layer at a time is in memory here."""

    def __init__(self, read: Callable[[int], Weights], device: torch.device) -> None:
        super().__init__()
        self._read = read
        self._pinned = device.type == "cuda"
        self._next: tuple[int, Future[Weights]] | None = None

    def start(self, layer_idx: int) -> None:
        """Begin to read that layer, if that has not begun."""
        if self._next is None or self._next[0] != layer_idx:
            self._next = layer_idx, self._pool.submit(self._load, layer_idx)

    def take(self, layer_idx: int) -> Weights:
        """The layer, waited for; it is the caller's alone from here on."""
        self.start(layer_idx)
        assert self._next is not None
        (_, future) = self._next
        self._next = None
        return future.result()

    def _load(self, layer_idx: int) -> Weights:
        weights = self._read(layer_idx)
        return {name: _pin(value) for name, value in weights.items()} if self._pinned else weights


class LayerWriter(_Thread):
    """Writes behind the work."""

    def __init__(self) -> None:
        super().__init__()
        self._last: Future[None] | None = None

    def write(self, job: Callable[[], None]) -> None:
        """Begin to write, when what came before is on the disk."""
        self.wait()
        self._last = self._pool.submit(job)

    def wait(self) -> None:
        """Until everything is on the disk.

        Raises:
            Whatever the writing raised.
        """
        if self._last is not None:
            last = self._last
            self._last = None
            last.result()


def return_freed_blocks(arch: Arch) -> None:
    """From here on the memory of a large tensor goes back to the system when the tensor does. glibc by itself keeps blocks of up to 32 MB,
    in pieces that the next matrices do not fit: half as much again as is in use. Larger blocks it returns anyway. Where layers are small,
    it is activations that come and go, which are paid for page by page: they stay."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    small = arch.num_linear_params <= SMALL_LAYER * arch.num_layers
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << (24 if small else 20))
        mallopt(
            _M_TRIM_THRESHOLD, 1 << (26 if small else 22)
        )  # 128 KB once the other is set, if nothing is said


def _pin(value: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
    if isinstance(value, Tensor):
        return value.pin_memory()
    zero = None if value.zero_point_OG is None else value.zero_point_OG.pin_memory()
    return replace(
        value, codes_OI=value.codes_OI.pin_memory(), scale_OG=value.scale_OG.pin_memory(), zero_point_OG=zero
    )
