"""The sizes of an engine: what a caller may set, and the defaults that follow from the model and the device's
memory.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.max_position import why_no_longer
from compress.runtime.batching import POLICIES, Policy
from compress.runtime.deployment import Deployment
from compress.runtime.kv_cache import max_pass_bytes
from compress.runtime.pass_memory import choosing_bytes, expanded_bytes, gathered_bytes, terms_bytes
from compress.runtime.speculative.speculation import Speculative

Order = Literal["arrival", "shortest"]
ORDERS: tuple[Order, ...] = ("arrival", "shortest")
CPU_CACHE_BYTES = 256 << 20
GPU_CACHE_FRAC = 0.8
"""Share of the GPU memory free after loading that the cache takes; the rest is for activations and logits."""
POSITIONS_PER_SAVED = 8192
"""A cache of so many positions has room for one saved state more than there are requests at once."""
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
      batch of the longest sequences needs. What a model with recurrences keeps for each request, its states,
      one block and a state that the prefix cache saves, comes on top of what is named here; further saved
      states are counted (one for 8,192 positions).
    - `kv_format`: `DENSE` (the dtype of the activations) or a name of `kernels/operands/paged.py`. None: the
      format in the model's config, or its dtype if there is none.
    - `sync`: launch no step before the last one's tokens are on the host.
    - `speculative`: options of speculative decoding; None decodes plainly.
    - `prefix_cache`: keep the keys and values of sequences, and share them with requests that begin alike
      (`prefix_cache.py`). Of models with recurrences the states after some prefixes are kept as well
      (`prefix_states.py`), unless a draft with recurrences speculates. Logits are those of an engine without
      it within the tolerance of a prefill in other chunks.
    - `max_waiting`: requests that may wait; `add` refuses more. None: any number.
    - `order`: whose turn it is among requests of one priority: "arrival", or "shortest" (fewest tokens
      first).
    - `policy`: when requests may join a batch (`batching.py`); `batch_delay_ms` is how long the first
      request of
      a dynamic group waits for others.
    - `itl_target_ms`: the time between tokens that prompts must not stretch: they are cut into chunks that
      fit
      (`step_budget.py`). None: chunks fill `max_step_tokens`.
    - `swap_bytes` (not used for models with recurrences): host memory for the keys and values of requests
      that lose their blocks; what does not fit is recomputed. 0: all are recomputed.

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
    prefix_cache: bool = False
    max_waiting: int | None = None
    order: Order = "arrival"
    policy: Policy = "continuous"
    batch_delay_ms: float = 10.0
    itl_target_ms: float | None = None
    swap_bytes: int = 0

    def __post_init__(self) -> None:
        if self.max_batch_size < 1 or self.max_step_tokens < self.max_batch_size:
            raise UsageError(
                f"max_batch_size is {self.max_batch_size} and max_step_tokens {self.max_step_tokens}; a "
                "step must hold one token of each request of a full batch: max_step_tokens >= "
                "max_batch_size >= 1."
            )
        rules = (
            ("max_waiting", self.max_waiting is None or self.max_waiting >= 1, "at least 1"),
            ("order", self.order in ORDERS, " or ".join(ORDERS)),
            ("policy", self.policy in POLICIES, " or ".join(POLICIES)),
            ("batch_delay_ms", 0 <= self.batch_delay_ms < float("inf"), "0 or a positive number"),
            (
                "itl_target_ms",
                self.itl_target_ms is None or 0 < self.itl_target_ms < float("inf"),
                "a positive number",
            ),
            ("swap_bytes", self.swap_bytes >= 0, "0 (no swap) or a number of bytes"),
        )
        for name, holds, meaning in rules:
            if not holds:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be {meaning}.")

    def dtype_for(self, arch: Arch, device: torch.device) -> torch.dtype:
        """Return the dtype of the activations."""
        if self.dtype is not None:
            return self.dtype
        stored: torch.dtype = getattr(torch, arch.dtype)
        return stored if device.type == "cuda" else torch.float32

    def deployment(self, device: torch.device, dtype: torch.dtype) -> Deployment:
        """Return the deployment of an engine with these sizes."""
        return Deployment(device, dtype, self.max_batch_size, self.max_step_tokens, self.max_model_len)

    @property
    def num_kept(self) -> int:
        """The most rows of a request in a decode step."""
        return 1 if self.speculative is None else self.speculative.k + 1

    def block_size_on(self, device: torch.device) -> int:
        """Return the number of positions of a cache block on this device."""
        return self.block_size if self.block_size is not None else DEFAULT_BLOCK_SIZE[device.type]

    def longest_of(self, arch: Arch) -> int:
        """Return the tokens of the longest sequence of a model: those that are named, or all that it has.

        Raises:
            UsageError: the model has fewer positions than `max_model_len`.
        """
        wanted = self.max_model_len if self.max_model_len is not None else arch.max_position
        if not 0 < wanted <= arch.max_position:
            raise UsageError(
                f"max_model_len is {wanted}; this model has positions 1..{arch.max_position}"
                f"{why_no_longer(arch)}."
            )
        return wanted

    def size_cache(
        self,
        arch: Arch,
        dtype: torch.dtype,
        device: torch.device,
        *,
        bytes_per_token: int,
        state_bytes: int = 0,
        saved_bytes: int = 0,
    ) -> tuple[int, int]:
        """Return the model length and the number of cache blocks, the padding block included. `state_bytes`
        are those of a request, `saved_bytes` those of a state that is saved: a cache without a limit leaves
        room for them, and for the block that each request then begins in.

        Raises:
            UsageError: the model has fewer positions than `max_model_len`, or the cache holds less than one
                sequence.
        """
        wanted = self.longest_of(arch)
        limit_bytes = self.kv_cache_bytes
        block_size = self.block_size_on(device)
        if limit_bytes is None:
            limit_bytes = CPU_CACHE_BYTES
            if device.type == "cuda":
                free = int(torch.cuda.mem_get_info(device)[0] * GPU_CACHE_FRAC)
                other = expanded_bytes(arch, dtype, max(wanted, self.max_step_tokens))
                other += gathered_bytes(arch, wanted, self.max_batch_size, self.max_step_tokens)
                other += choosing_bytes(arch, wanted, self.max_step_tokens)
                other += terms_bytes(arch, self.max_step_tokens)
                other += max_pass_bytes(arch, self.max_step_tokens, self.max_batch_size + 1)
                if state_bytes:
                    of_request = state_bytes + saved_bytes + bytes_per_token * block_size
                    of_requests = (self.max_batch_size + 1) * of_request
                    if of_requests > free:
                        raise UsageError(
                            f"the states of {self.max_batch_size} requests are {of_requests:,} bytes, more "
                            f"than the {free:,} that are free for a cache. Lower max_batch_size or the "
                            "number of tokens that speculation proposes"
                            f"{', or leave out the prefix cache' if saved_bytes else ''}."
                        )
                    other += of_requests
                limit_bytes = max(0, free - other)
        # A model of recurrences alone caches nothing; its blocks are slots of states.
        of_position = max(1, bytes_per_token) + -(-saved_bytes // POSITIONS_PER_SAVED)
        affordable = limit_bytes // (of_position * block_size) - 1
        sequence_blocks = -(-wanted // block_size)
        if affordable < (sequence_blocks if self.max_model_len is not None else 1):
            raise UsageError(
                f"a KV cache of {limit_bytes} bytes holds {max(affordable, 0) * block_size} positions of "
                f"{of_position} bytes, fewer than one sequence of {wanted} tokens. Raise "
                "kv_cache_bytes or lower max_model_len."
            )
        num_blocks = min(affordable, self.max_batch_size * sequence_blocks)
        return min(wanted, num_blocks * block_size), num_blocks + 1

    def num_saved(self, num_positions: int) -> int:
        """Return the number of states that are saved with a cache of so many positions."""
        return self.max_batch_size + num_positions // POSITIONS_PER_SAVED
