"""`Graphs` that do on a CPU what a graph adds to a step."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from compress.runtime.graphs import Graphs


class RehearsedGraphs(Graphs[Any]):
    """Fills batches up to the sizes of graphs with padding rows, and warms up every pass it returns."""

    def __init__(self, device: torch.device, max_rows: int) -> None:
        super().__init__(device, max_rows)
        self.max_rows = self._sizes[-1]

    def num_rows(self, wanted: int) -> int:
        """Return the size of the graph that serves so many rows."""
        return next(size for size in self._sizes if size >= wanted)

    def prepare(
        self, key: Any, function: Callable[[], Any], *, set_aside: Any = nullcontext
    ) -> Callable[[], Any]:
        """Run the function twice without effect."""
        with torch.inference_mode(), set_aside():
            function()
            function()
        return function
