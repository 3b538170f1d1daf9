"""Tests that need what this machine lacks are skipped, with the reason; torch is imported only when a GPU
test was collected.
"""

import contextlib
import gc
import importlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from compress import machine
from tests.support.slow import PART_VARIABLE, in_part, mark_slow_cases

settings.register_profile(
    "repeatable",
    derandomize=True,  # a red run is red again on the next machine
    deadline=None,  # no test is about how fast the machine is
)
settings.load_profile("repeatable")
machine.READ_BYTES["cpu"] = 1 << 24  # a rate, which no test depends on: reading 1 GiB takes seconds
ROOT = Path(__file__).parent.parent
gc.disable()  # until tests are collected: hardly anything that is imported goes away again


def pytest_collection(session: pytest.Session) -> None:
    """Import all test files, the last one first, in every other worker that is about to collect all of them
    in their order: where nothing is compiled yet, two workers that go the same way compile the same files."""
    is_odd = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 2
    if is_odd and [Path(each).resolve() for each in session.config.args] == [ROOT / "tests"]:
        for file in sorted((ROOT / "tests").rglob("test_*.py"), reverse=True):
            with contextlib.suppress(Exception, pytest.skip.Exception):  # its collection reports it
                importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Tell the garbage collector that what was imported and collected lives to the end: looking through it
    again and again costs seconds of every worker."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_slow_cases(items)
    if part := os.environ.get(PART_VARIABLE):
        items[:] = [
            item for item in items if not item.get_closest_marker("slow") or in_part(item.nodeid, part)
        ]
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_cuda():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    for item in items:
        interop = item.get_closest_marker("interop")
        if interop is None or any(importlib.util.find_spec(package) for package in interop.args[1:]):
            continue
        if not (ROOT / interop.args[0] / "bin" / "python").exists():
            item.add_marker(pytest.mark.skip(reason=f"needs {interop.args[0]}, which make builds"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def freed_memory_is_nan() -> None:
    """Free blocks of NaN on the GPU, from which the allocator takes the outputs of the test: NaN passes no
    comparison, so an element that a kernel does not write is seen."""
    import torch

    large = [torch.full((1 << 24,), float("nan"), device="cuda") for _ in range(4)]
    small = [torch.full((1 << 16,), float("nan"), device="cuda") for _ in range(16)]
    del large, small


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    """Have torch fill what it allocates with NaN."""
    import torch

    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled
