"""Poisoned memory for tests of kernels: an element that a kernel does not write is NaN, which passes no
comparison. torch is imported where a fixture is used.
"""

from collections.abc import Iterator

import pytest


@pytest.fixture
def freed_memory_is_nan() -> None:
    """Free blocks of NaN, from which the allocator takes the outputs of the test."""
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
