"""The bytes that an operation allocates on a CPU at its peak, as PyTorch's profiler sees them."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_allocated(compute: Callable[[], Any]) -> int:
    """Return the most bytes that tensors of `compute` have at once, beyond those that were there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found, torch.no_grad():
        compute()
    results = found.profiler.kineto_results  # type: ignore[union-attr]
    events = [each for each in results.events() if each.name() == "[memory]"]
    held = most = 0
    for each in sorted(events, key=lambda each: each.start_ns()):
        held += each.nbytes()
        most = max(most, held)
    return most
