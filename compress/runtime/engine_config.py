"""The sizes of an engine: what a caller may set, and the defaults that follow from the model and the device's
memory.
"""

from dataclasses import dataclass

import torch

from compress.errors import UsageError
from compress.models.arch import Arch
from compress.runtime.speculative.speculation import Speculative

CPU_CACHE_BYTES = 256 << 20
GPU_CACHE_FRAC = 0.8
"""Share of the GPU memory free after loading that the cache takes; the rest is for activations and logits."""
DEFAULT_BLOCK_SIZE = {"cuda": 64, "cpu": 16}
"""Positions of a block by device type. On CUDA a block is a tile of the attention kernels."""


@dataclass(frozen=True)
class EngineConfig:
    """The sizes and formats of an engine.

    - `dtype`: of the activations. None: the checkpoint's on CUDA, float32 on a CPU.
    - `max_batch_size`: requests that run at once.
    - `max_model_len`: tokens of a sequence. None: the model's own limit, or what the cache holds if that is
      less. It also decides, once, whether a LongRoPE model rotates by its factors for short sequences or by
      those for long ones.
    - `block_size`: positions of a cache block. None: 64 on CUDA, 16 on a CPU.
    - `max_step_tokens`: budget of one step; longer prompts are prefilled in chunks.
    - `kv_cache_bytes`: None: 80 % of the free memory on CUDA, 256 MiB on a CPU. It is never more than a full
      batch of the longest sequences needs.
    - `kv_format`: `DENSE` (the dtype of the activations) or a name of `kernels/operands/paged.py`. None: the
      format in the model's config, or its dtype if there is none.
    - `sync`: launch no step before the last one's tokens are on the host.
    - `speculative`: options of speculative decoding; None decodes plainly.

    Raises:
        UsageError: the sizes contradict one another.
    """

    dtype: torch.dtype | None = None
    max_batch_size: int = 8
    max_model_len: int | None = None
    block_size: int | None = None
    max_step_tokens: int = 2048
    kv_cache_bytes: int | None = None
    kv_format: str | None = None
    sync: bool = False
    speculative: Speculative | None = None

    def __post_init__(self) -> None:
        if self.max_batch_size < 1 or self.max_step_tokens < self.max_batch_size:
            raise UsageError(
                f"max_batch_size is {self.max_batch_size} and max_step_tokens {self.max_step_tokens}; a "
                "step must hold one token of each request of a full batch: max_step_tokens >= "
                "max_batch_size >= 1."
            )

    def dtype_for(self, arch: Arch, device: torch.device) -> torch.dtype:
        """Return the dtype of the activations."""
        if self.dtype is not None:
            return self.dtype
        stored: torch.dtype = getattr(torch, arch.dtype)
        return stored if device.type == "cuda" else torch.float32

    def block_size_on(self, device: torch.device) -> int:
        """Return the number of positions of a cache block on this device."""
        return self.block_size if self.block_size is not None else DEFAULT_BLOCK_SIZE[device.type]

    def size_cache(self, arch: Arch, device: torch.device, *, bytes_per_token: int) -> tuple[int, int]:
        """Return the model length and the number of cache blocks, the padding block included.

        Raises:
            UsageError: the model has fewer positions than `max_model_len`, or the cache holds less than one
                sequence.
        """
        wanted = self.max_model_len if self.max_model_len is not None else arch.max_position
        if not 0 < wanted <= arch.max_position:
            raise UsageError(f"max_model_len is {wanted}; this model has positions 1..{arch.max_position}.")
        limit_bytes = self.kv_cache_bytes
        block_size = self.block_size_on(device)
        if limit_bytes is None:
            limit_bytes = (
                int(torch.cuda.mem_get_info(device)[0] * GPU_CACHE_FRAC)
                if device.type == "cuda"
                else CPU_CACHE_BYTES
            )
        affordable = limit_bytes // (bytes_per_token * block_size) - 1
        sequence_blocks = -(-wanted // block_size)
        if affordable < (sequence_blocks if self.max_model_len is not None else 1):
            raise UsageError(
                f"a KV cache of {limit_bytes} bytes holds {max(affordable, 0) * block_size} positions of "
                f"{bytes_per_token} bytes, fewer than one sequence of {wanted} tokens. Raise "
                "kv_cache_bytes or lower max_model_len."
            )
        num_blocks = min(affordable, self.max_batch_size * sequence_blocks)
        return min(wanted, num_blocks * block_size), num_blocks + 1
