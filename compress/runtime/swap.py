"""Host memory for the keys and values of requests that lose their blocks, so that they need not be computed
again.

The memory is pinned and cut into slots of one block of all layers. A block travels as its bytes: what comes
back is bit for bit what went.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.kernels.step.host_memory import sent
from compress.runtime.generation import Generation
from compress.runtime.kv_cache import KVCache


class HostSwap:
    """At most `num_bytes` of blocks of a cache in host memory. `num_out` and `num_in` count requests."""

    def __init__(self, cache: KVCache, *, num_bytes: int, device: torch.device) -> None:
        self._cache = cache
        self._device = device
        self._slots_NB = torch.empty(
            num_bytes // cache.block_bytes,
            cache.block_bytes,
            dtype=torch.uint8,
            pin_memory=device.type == "cuda",
        )
        self._free = list(range(len(self._slots_NB)))
        self._held: dict[Generation, tuple[list[int], int]] = {}
        self.num_out = 0
        self.num_in = 0

    def store(self, generation: Generation) -> bool:
        """Copy the blocks of a request that is about to lose them; return whether there was room."""
        blocks = self._used_blocks(generation, generation.num_computed)
        if len(blocks) > len(self._free):
            return False
        slots = [self._free.pop() for _ in blocks]
        self._slots_NB[slots] = self._cache.read_blocks(self._ids(blocks)).cpu()
        self._held[generation] = (slots, generation.num_computed)
        self.num_out += 1
        return True

    def holds(self, generation: Generation) -> bool:
        """Return whether the keys and values of a request are here."""
        return generation in self._held

    def restore(self, generation: Generation) -> int:
        """Copy them into the request's new blocks; return how many tokens they cover."""
        slots, num_tokens = self._held.pop(generation)
        blocks = self._used_blocks(generation, num_tokens)
        self._cache.write_blocks(self._ids(blocks), sent(self._slots_NB[slots], self._device))
        self._free += slots
        self.num_in += 1
        return num_tokens

    def drop(self, generation: Generation) -> None:
        """Forget a request that has ended, if it is here."""
        if generation in self._held:
            slots, _ = self._held.pop(generation)
            self._free += slots

    def _used_blocks(self, generation: Generation, num_tokens: int) -> list[int]:
        return generation.blocks[: -(-num_tokens // self._cache.block_size)]

    def _ids(self, blocks: Sequence[int]) -> Tensor:
        return sent(torch.tensor(blocks, dtype=torch.int64), self._device)
