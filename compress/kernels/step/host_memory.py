"""Memory that a decode step's kernels and the host both reach, so that neither waits for a transfer of the
other.
"""

import torch
from torch import Tensor

from compress.kernels.compilers.triton import interpreted, triton


def uses_kernels(device: torch.device) -> bool:
    """Return whether a step runs the Triton kernels on this device, and not their torch equivalents."""
    return triton is not None and (device.type == "cuda" or interpreted())


def host_visible(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros that kernels on `device` and the host both reach.

    With kernels on CUDA that is pinned memory of the host, which kernels address directly. Without them it is
    the device's own memory, because torch operators cannot.
    """
    pinned = device.type == "cuda" and uses_kernels(device)
    return (
        torch.zeros(shape, dtype=dtype, pin_memory=True)
        if pinned
        else torch.zeros(shape, dtype=dtype, device=device)
    )
