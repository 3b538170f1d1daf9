"""Solves side by side: every item once, what memory did not suffice for is left, an error is raised. CUDA's
streams are stood in for, so that the threads run on a CPU."""

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from compress.calibrate import side_by_side as module
from compress.calibrate.side_by_side import MAX_AT_ONCE, SHARED_BYTES, num_at_once, side_by_side

CUDA = torch.device("cuda", 0)


class Stream:
    """Counts what waits for it and what it waits for."""

    def __init__(self) -> None:
        self.waited_for: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited_for.append(other)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[Stream, list[Stream]]:
    """The caller's stream and those of the threads."""
    present, own = Stream(), [Stream() for _ in range(MAX_AT_ONCE)]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: present)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(module, "_streams", lambda device: own)
    return present, own


def test_a_cpu_leaves_all_to_the_caller() -> None:
    assert side_by_side(pytest.fail, [1, 2, 3], torch.device("cpu"), 8) == [1, 2, 3]


@pytest.mark.parametrize(("num_items", "at_once"), [(1, 8), (5, 1)])
def test_one_at_a_time_is_left_to_the_caller(num_items: int, at_once: int) -> None:
    items = list(range(num_items))
    assert side_by_side(pytest.fail, items, CUDA, at_once) == items


def test_each_item_is_solved_once_between_two_waits(streams: tuple[Stream, list[Stream]]) -> None:
    present, own = streams
    together = threading.Barrier(3, timeout=30)  # passes only if three run at once
    solved: list[int] = []

    def solve(item: int) -> None:
        assert not torch.is_grad_enabled()
        if item < 3:
            together.wait()
        solved.append(item)

    with torch.no_grad():
        assert side_by_side(solve, range(20), CUDA, 3) == []
    assert sorted(solved) == list(range(20))
    assert all(each.waited_for == [present] for each in own[:3])
    assert present.waited_for == own[:3]
    assert not any(each.waited_for for each in own[3:])


def test_what_runs_out_of_memory_is_left_in_its_order(streams: tuple[Stream, list[Stream]]) -> None:
    def solve(item: int) -> None:
        if item % 3 == 0:
            raise torch.OutOfMemoryError("full")

    assert side_by_side(solve, range(10), CUDA, 4) == [0, 3, 6, 9]


def test_another_error_is_raised_after_the_streams_have_met(streams: tuple[Stream, list[Stream]]) -> None:
    def solve(item: int) -> None:
        if item == 4:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        side_by_side(solve, range(10), CUDA, 2)
    present, own = streams
    assert present.waited_for == own[:2]


def test_large_matrices_are_alone() -> None:
    assert num_at_once(1536, 2048) == MAX_AT_ONCE
    assert num_at_once(4096, 14336) == 1
    rows, columns = 8192, 4096
    assert num_at_once(rows, columns) * 36 * columns * (rows + columns) <= SHARED_BYTES
