"""The activations of a rank's samples between two layers: on the device, or in host memory once the device
ran out of memory.

Shapes: N samples, B of them, S sequence, D hidden.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class Samples:
    """Activations [N, S, D]. Reading a slice of samples returns [B, S, D] on the device, wherever the whole
    is kept."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, on_host: bool = False
    ) -> None:
        self.device = device
        self.on_host = on_host
        if not on_host:
            try:
                self._x_NSD = torch.empty(*shape, dtype=dtype, device=device)
            except torch.OutOfMemoryError:
                self.on_host = True
        if self.on_host:
            self._x_NSD = torch.empty(*shape, dtype=dtype, pin_memory=device.type == "cuda")

    @staticmethod
    def from_tensor(x_NSD: Tensor) -> "Samples":
        """Return a copy of `x_NSD`, on its device."""
        samples = Samples(x_NSD.shape, x_NSD.dtype, x_NSD.device)
        samples._x_NSD.copy_(x_NSD)
        return samples

    def empty_like(self, width: int) -> "Samples":
        """Return uninitialised activations [N, S, width], on the host if these are."""
        return Samples((*self._x_NSD.shape[:2], width), self._x_NSD.dtype, self.device, on_host=self.on_host)

    def clone(self) -> "Samples":
        """Return a copy that shares no memory with these."""
        other = Samples(self._x_NSD.shape, self._x_NSD.dtype, self.device)
        other._x_NSD.copy_(self._x_NSD)
        return other

    @property
    def seq_len(self) -> int:
        return self._x_NSD.shape[1]

    def __getitem__(self, some: slice) -> Tensor:
        return self._x_NSD[some].to(self.device, non_blocking=True)

    def __setitem__(self, some: slice, x_BSD: Tensor) -> None:
        self._x_NSD[some] = x_BSD.to(self._x_NSD.dtype)

    def move_to_host(self) -> bool:
        """Move the activations to host memory, pinned where the device is a GPU. Return False if they were
        there already."""
        if self.on_host:
            return False
        host_NSD = torch.empty(
            self._x_NSD.shape, dtype=self._x_NSD.dtype, pin_memory=self.device.type == "cuda"
        )
        self._x_NSD = host_NSD.copy_(self._x_NSD)
        self.on_host = True
        return True
