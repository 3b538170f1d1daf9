"""The facts of a GPU that plans of launches depend on."""

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Gpu:
    """A device: compute capability times ten, multiprocessors, and bytes of shared memory that a block may
    have."""

    sm: int
    num_sms: int
    shared_bytes: int


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """Return the facts of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    shared_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Gpu(10 * properties.major + properties.minor, properties.multi_processor_count, shared_bytes)
