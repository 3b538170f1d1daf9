"""The prefix cache: blocks that hold the keys and values of a sequence's beginning, found by its tokens.

The key of a block is a digest of the key of the block before it and of its own tokens, so it depends on the
whole sequence up to there. The first block follows a salt made of the model and the format of its keys and
values. The tokens of a block are compared as well, so that not even a collision could give a request
another's keys. Only full blocks are shared, and no request writes to them.

A block is cached from the step that is to compute it. Within that step a pass writes the keys and values of
all its rows before any row attends to them, layer by layer, so another request of the same pass may share
it at once: a burst of prompts with one beginning computes it once. Long prompts of a step are one pass;
others are not (`prefill.py`). Blocks of a model with states are cached otherwise (`prefix_states.py`).

A head that speculates has a row of each token in the same block (`speculative/head_proposer.py`). That row
depends on the token after it too, and those of several heads on as many, so the key of a block then covers
the tokens after the block. Each step of the head writes the rows of the last `num_rewritten_rows` tokens of a
sequence again, from hidden states that no block holds; a draft model writes that of the last one. These
tokens are neither cached nor taken from the cache.
"""

import hashlib
from array import array
from collections.abc import Callable

from compress.runtime.block_pool import BlockPool
from compress.runtime.generation import Generation


class PrefixCache:
    """The cached blocks of a pool by the tokens of the sequences up to their ends, and by
    `num_tokens_after` more; the last `num_rewritten_rows` of a sequence are not cached.

    `num_queried` and `num_hits` count the tokens of prompts that were looked up and found. `on_forget` is
    called with the key of each block that is evicted.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        salt: str,
        num_rewritten_rows: int = 0,
        num_tokens_after: int = 0,
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._num_rewritten_rows = num_rewritten_rows
        self._num_tokens_after = num_tokens_after
        self._salt = hashlib.sha256(salt.encode()).digest()
        self._blocks: dict[bytes, int] = {}
        self._entries: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self._of_this_step: dict[int, bool] = {}
        self.num_queried = 0
        self.num_hits = 0
        self.on_forget: Callable[[bytes], None] = lambda key: None
        pool.on_eviction = self._forget

    def begin_step(self) -> None:
        """Note that the blocks cached so far are computed before any pass of the next step."""
        self._of_this_step.clear()

    def num_cacheable(self, generation: Generation) -> int:
        """Return how many of a sequence's tokens may be cached."""
        return len(generation.tokens) - self._num_rewritten_rows

    def num_findable(self, generation: Generation) -> int:
        """Return how many of a sequence's tokens may be taken from the cache: without the last, which the
        model must see to choose the next."""
        return min(self.num_cacheable(generation), len(generation.tokens) - 1)

    def find(self, generation: Generation, *, long: bool) -> list[int]:
        """Return the blocks that hold the beginning of a sequence.

        Blocks of the step under way are found by long prompts only, and only where a long prompt computes
        them.
        """
        found: list[int] = []
        for idx in range(self.num_findable(generation) // self._block_size):
            block = self.block(generation, idx)
            if block is None:
                break
            if block in self._of_this_step and not (long and self._of_this_step[block]):
                break
            found.append(block)
        return found

    def count(self, generation: Generation) -> None:
        """Count the prompt of a request that was just admitted."""
        self.num_queried += len(generation.request.prompt)
        self.num_hits += generation.cached_tokens

    def insert(self, generation: Generation, num_tokens: int, *, long: bool | None = None) -> None:
        """Cache the full blocks of the first `num_tokens` tokens of a sequence, as far as they may be cached.

        `long` is whether a long prompt of the step under way computes them; None: they are computed.
        """
        num_tokens = min(num_tokens, self.num_cacheable(generation))
        for idx in range(generation.num_cached_blocks, num_tokens // self._block_size):
            generation.num_cached_blocks = idx + 1
            key = self.key(generation, idx)
            block = generation.blocks[idx]
            if idx == 0 and generation.first_copy is not None:
                block = generation.first_copy
            if key in self._blocks or block in self._entries:
                continue  # another request computed the same tokens at the same time
            self._blocks[key] = block
            self._entries[block] = (key, self._tokens(generation, idx))
            self._pool.cache(block)
            if long is not None:
                self._of_this_step[block] = long

    def key(self, generation: Generation, idx: int) -> bytes:
        """Return the key of a full block of a sequence."""
        keys = generation.block_keys
        while len(keys) <= idx:
            before = keys[-1] if keys else self._salt
            own = array("q", self._tokens(generation, len(keys))).tobytes()
            keys.append(hashlib.sha256(before + own).digest())
        return keys[idx]

    def block(self, generation: Generation, idx: int) -> int | None:
        """Return the cached block with the tokens of a full block of a sequence, and those before it."""
        block = self._blocks.get(self.key(generation, idx))
        if block is None or self._entries[block][1] != self._tokens(generation, idx):
            return None
        return block

    def _tokens(self, generation: Generation, idx: int) -> tuple[int, ...]:
        """Return the tokens that a block's key adds to that of the block before it."""
        start = idx * self._block_size
        return tuple(generation.tokens[start : start + self._block_size + self._num_tokens_after])

    def _forget(self, block: int) -> None:
        key, _ = self._entries.pop(block)
        del self._blocks[key]
        self._of_this_step.pop(block, None)
        self.on_forget(key)
