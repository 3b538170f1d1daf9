"""A deployment: the device, dtype and sizes that a model runs with, on which every choice of a kernel
depends.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.problem import KernelDevice
from compress.models.arch import Arch

SHORT_PROMPT_ROWS = 128
"""Tokens of a short prompt on a GPU, at most: up to about as many rows a linear's time is the bytes of its
weights."""


@dataclass(frozen=True)
class Deployment:
    """The device and dtype a model runs in, and the sizes of the batches it must serve. Without a
    `max_model_len` sequences are as long as the model's are."""

    device: torch.device
    dtype: torch.dtype
    max_batch_size: int
    max_step_tokens: int
    max_model_len: int | None = None

    def num_positions(self, arch: Arch) -> int:
        """Return the positions of the longest sequence."""
        return arch.max_position if self.max_model_len is None else min(self.max_model_len, arch.max_position)

    @property
    def max_decode_rows(self) -> int:
        """Rows that decode kernels must serve at once: a full batch, or short prompts."""
        return max(self.max_batch_size, self.short_prompt_rows)

    @property
    def short_prompt_rows(self) -> int:
        """Number of tokens up to which a prompt is short and uses decode kernels; 0 on a CPU, where no prompt
        does.
        """
        return SHORT_PROMPT_ROWS if self.device.type == "cuda" else 0

    def placed(self, weight: Tensor) -> Tensor:
        """Return a weight on the device, in the dtype."""
        return weight.to(device=self.device, dtype=self.dtype)

    @property
    def kernel_device(self) -> KernelDevice:
        """The device as kernels are selected for it."""
        return KernelDevice.from_torch(
            self.device, self.dtype, decode_rows=self.max_decode_rows, prefill_rows=self.max_step_tokens
        )
