"""Solves of a layer that do not depend on one another, side by side on a GPU.

Factors and columns of one small matrix keep a GPU busy for microseconds at a time, and a mixture has hundreds
of such matrices in a layer. Each is solved in a thread on a stream of its own, by the same operations as
alone, so the codes are the same bits. A CPU solves one at a time: its threads share one matrix.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")
MAX_AT_ONCE = 8
"""Most solves side by side; Python's lock lets one thread at a time launch."""
SHARED_BYTES = 6_000_000_000
"""Most memory of solves side by side. One that needs more is alone."""
COPIES = 9
"""float32 matrices of the size of a stack, and of its moment, that one solve holds at most
(`calibrate/estimate.py`)."""


def num_at_once(rows: int, columns: int) -> int:
    """Return how many solves of matrices [rows, columns], each with a moment of its columns, fit side by
    side on a GPU."""
    return max(1, min(MAX_AT_ONCE, SHARED_BYTES // (4 * COPIES * columns * (rows + columns))))


def side_by_side(
    solve: Callable[[T], None], items: Sequence[T], device: torch.device, at_once: int
) -> list[T]:
    """Solve items side by side, and return those that are left to be solved alone: where memory did not
    suffice, and all of them on a CPU.

    What the caller's stream has computed is complete before the first solve begins, and all of them before
    its next operation.

    Raises:
        Exception: what a solve raised other than that memory is exhausted.
    """
    if device.type != "cuda" or min(at_once, len(items)) < 2:
        return list(items)
    present = torch.cuda.current_stream(device)
    streams = _streams(device)[: min(at_once, len(items))]
    waiting = deque(enumerate(items))
    takes_gradients = torch.is_grad_enabled()

    def work(stream: torch.cuda.Stream) -> list[int]:
        stream.wait_stream(present)
        left = []
        with torch.cuda.device(device), torch.cuda.stream(stream), torch.set_grad_enabled(takes_gradients):
            while waiting:
                try:
                    idx, item = waiting.popleft()
                except IndexError:  # another thread took the last one
                    break
                try:
                    solve(item)
                except torch.OutOfMemoryError:
                    left.append(idx)
        return left

    try:
        with ThreadPoolExecutor(len(streams)) as pool:
            left = [idx for each in pool.map(work, streams) for idx in each]
    finally:
        for stream in streams:
            present.wait_stream(stream)
    return [items[idx] for idx in sorted(left)]


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Return the streams of a device, always the same ones: each keeps memory of its own."""
    torch.linalg.cholesky(torch.eye(2, device=device))  # loads the library, which threads may not do at once
    return [torch.cuda.Stream(device) for _ in range(MAX_AT_ONCE)]
