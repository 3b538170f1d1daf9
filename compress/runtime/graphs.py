"""CUDA graphs of passes over tensors that stay in place: each pass is captured once and then replayed.

A function is warmed up before it is captured, because that is when its kernels are compiled and tuned. So
either it returns the same when it runs again, or the caller sets aside what it changes. On a CPU functions
are called as they are.
"""

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from compress.kernels.operands.paged import SECTION_KEYS

T = TypeVar("T")
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512)
"""The numbers of rows that graphs are captured for. A batch between two sizes is filled up with padding rows.
"""
WARMUPS = 2


def positions_of_graph(longest: int) -> int:
    """Return the positions of a context in the graph that serves contexts of at most `longest`. Contexts of
    more than a section have graphs by powers of two: kernels divide those of a graph alike."""
    return SECTION_KEYS << (max(longest - 1, 0) // SECTION_KEYS).bit_length()


@dataclass(frozen=True)
class _Captured(Generic[T]):
    """A captured graph and the tensors that a replay of it fills."""

    graph: torch.cuda.CUDAGraph
    result: T

    def __call__(self) -> T:
        self.graph.replay()
        return self.result


class Graphs(Generic[T]):
    """One graph for each key, for batches of at most `max_rows` rows. Functions that have run before, with
    these shapes, need no `warmups`."""

    def __init__(self, device: torch.device, max_rows: int, *, warmups: int = WARMUPS) -> None:
        self._device = device
        self._warmups = warmups
        self._captured: dict[Hashable, _Captured[T]] = {}
        self._pool: Any = None
        self._sizes = [size for size in GRAPH_SIZES if size < max_rows] + [graph_size(max_rows)]
        self.max_rows = self._sizes[-1] if device.type == "cuda" else max_rows

    def num_rows(self, wanted: int) -> int:
        """Return the number of rows of the graph that serves `wanted` rows; on a CPU that is `wanted`."""
        return next(size for size in self._sizes if size >= wanted) if self._device.type == "cuda" else wanted

    def has(self, key: Hashable) -> bool:
        """Return whether `prepare` captures nothing for this key."""
        return self._device.type != "cuda" or key in self._captured

    @torch.inference_mode()
    def prepare(
        self,
        key: Hashable,
        function: Callable[[], T],
        *,
        set_aside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Callable[[], T]:
        """Capture `function` if there is no graph for `key` yet, and return what replays it.

        The result of a replay is overwritten by the next replay with the same key. Within `set_aside()` the
        function may run without effect.
        """
        if self._device.type != "cuda":
            return function
        if key not in self._captured:
            self._captured[key] = self._capture(function, set_aside)
        return self._captured[key]

    @torch.inference_mode()
    def run(
        self,
        key: Hashable,
        function: Callable[[], T],
        *,
        set_aside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> T:
        """Prepare `function` and run it once."""
        return self.prepare(key, function, set_aside=set_aside)()

    def _capture(
        self, function: Callable[[], T], set_aside: Callable[[], AbstractContextManager[None]]
    ) -> _Captured[T]:
        stream = torch.cuda.Stream(self._device)
        with set_aside():
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                for _ in range(self._warmups):
                    function()
            torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=self._pool):
            result = function()
        self._pool = self._pool or graph.pool()
        return _Captured(graph, result)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from collecting garbage meanwhile: a graph of another engine that went this way would end
    a capture, because none may be freed during one."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def graph_size(num_rows: int) -> int:
    """Return the smallest graph size that holds `num_rows`; above the largest, a whole multiple of it."""
    largest = GRAPH_SIZES[-1]
    return next((size for size in GRAPH_SIZES if size >= num_rows), -(-num_rows // largest) * largest)
