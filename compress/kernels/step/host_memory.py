"""Memory that both host and kernels reach, and transfers that neither of them waits for."""

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


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on `device`. On CUDA the host waits for nothing that was launched before,
    and may write to its tensor at once: the transfer reads a copy in pinned memory, which torch's allocator
    keeps until the transfer is done.
    """
    if device.type == "cpu":
        return tensor
    pinned = tensor.pin_memory() if tensor.numel() else tensor
    return pinned.to(device, non_blocking=True)


def received(tensor: Tensor) -> Tensor:
    """Return a copy in memory that the host may read once an event recorded after this call has completed."""
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
