"""Functions of tensors that stay where they are: on CUDA each is captured at its first call and replayed, elsewhere called.

The first call warms up: kernels are compiled and tuned. So a function must give the same result when it is run again, or be warmed up with
what it changes set aside.
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch

from compress.runtime.decode import GRAPH_SIZES, graph_size

T = TypeVar("T")
_WARMUPS = 2


class Graphs(Generic[T]):
    """One graph for each key; what a call returns is overwritten by the next one with the key."""

    def __init__(self, device: torch.device, max_rows: int) -> None:
        self._device = device
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, T]] = {}
        self._pool: Any = None
        self._sizes = [size for size in GRAPH_SIZES if size < max_rows] + [graph_size(max_rows)]
        self.max_rows = self._sizes[-1] if device.type == "cuda" else max_rows

    def num_rows(self, wanted: int) -> int:
        """Of the graph that serves so many."""
        return next(size for size in self._sizes if size >= wanted) if self._device.type == "cuda" else wanted

    @torch.inference_mode()
    def run(
        self,
        key: Hashable,
        function: Callable[[], T],
        *,
        aside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> T:
        """`aside`: within it the function may be run without effect."""
        if self._device.type != "cuda":
            return function()
        if key not in self._captured:
            self._captured[key] = self._capture(function, aside)
        graph, result = self._captured[key]
        graph.replay()
        return result

    def _capture(
        self, function: Callable[[], T], aside: Callable[[], AbstractContextManager[None]]
    ) -> tuple[torch.cuda.CUDAGraph, T]:
        stream = torch.cuda.Stream(self._device)
        with aside():
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                for _ in range(_WARMUPS):
                    function()
            torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = function()
        self._pool = self._pool or graph.pool()
        return graph, result
