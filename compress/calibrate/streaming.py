"""A loop over layers reads the next layer and writes the last one while it processes the present one.

A reader thread holds at most one layer ahead; for a GPU it lies in pinned memory, because a copy from other
memory would block the host. Each writer thread, by default one, has at most one file to write. An error in a
thread is raised where its result is requested.
"""

import ctypes
from collections import deque
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
"""Largest number of parameters of a layer whose memory the process may keep when it is freed."""
KEPT_BYTES = 1 << 26
"""Largest amount of freed memory that the process keeps when layers are small."""
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


class _Threads:
    """Threads, one by default, for the duration of a block; at its end started jobs are completed and others
    are cancelled."""

    def __init__(self, count: int = 1) -> None:
        self._pool = ThreadPoolExecutor(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)


class LayerPrefetcher(_Threads):
    """Reads layers in advance. `read` runs in a thread, and one layer at a time is held here."""

    def __init__(self, read: Callable[[int], Weights], device: torch.device) -> None:
        super().__init__()
        self._read = read
        self._pinned = device.type == "cuda"
        self._next: tuple[int, Future[Weights]] | None = None

    def start(self, layer_idx: int) -> None:
        """Begin to read that layer, unless that has begun."""
        if self._next is None or self._next[0] != layer_idx:
            self._next = layer_idx, self._pool.submit(self._load, layer_idx)

    def take(self, layer_idx: int) -> Weights:
        """Wait for the layer and return it; no reference to it is kept here."""
        self.start(layer_idx)
        assert self._next is not None
        (_, future) = self._next
        self._next = None
        return future.result()

    def _load(self, layer_idx: int) -> Weights:
        weights = self._read(layer_idx)
        return {name: _pin(value) for name, value in weights.items()} if self._pinned else weights


class LayerWriter(_Threads):
    """Writes files in threads while the caller goes on, at most `at_once` of them at a time. A second thread
    writes the next file while the first one computes the digest of the last."""

    def __init__(self, at_once: int = 1) -> None:
        super().__init__(at_once)
        self._at_once = at_once
        self._pending = deque[Future[None]]()

    def write(self, job: Callable[[], None]) -> None:
        """Wait until fewer than `at_once` files are being written, then start `job`, which writes another.

        Raises:
            Exception: whatever the writing of an earlier file raised.
        """
        while len(self._pending) >= self._at_once:
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(job))

    def wait(self) -> None:
        """Wait until everything is on the disk.

        Raises:
            Exception: whatever the writing raised.
        """
        while self._pending:
            self._pending.popleft().result()


def keeps_freed_blocks(arch: Arch) -> bool:
    """Return whether `return_freed_blocks` lets the process keep up to `KEPT_BYTES` of freed memory."""
    return arch.num_linear_params <= SMALL_LAYER * arch.num_layers


def return_freed_blocks(arch: Arch) -> None:
    """Make the allocator return the memory of large tensors to the system when they are freed. By default
    glibc keeps blocks of up to 32 MB, in pieces that the next matrices do not fit, which adds half of the
    memory in use. It returns larger blocks in any case. With small layers the blocks are activations, whose
    pages cost time to obtain again, so these are kept."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    keeps = keeps_freed_blocks(arch)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << (24 if keeps else 20))
        # Setting the first threshold alone would lower this one to 128 KB.
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES if keeps else 1 << 22)


def _pin(value: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
    if isinstance(value, Tensor):
        return value.pin_memory()
    zero = None if value.zero_point_OG is None else value.zero_point_OG.pin_memory()
    return replace(
        value, codes_OI=value.codes_OI.pin_memory(), scale_OG=value.scale_OG.pin_memory(), zero_point_OG=zero
    )
