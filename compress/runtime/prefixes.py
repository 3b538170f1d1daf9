"""Prefixes: what a request finds in the cache of the beginning of its tokens, and what it leaves there.

Blocks hold keys and values (`prefix_cache.py`). Where sequences have states, blocks are kept with the state
after the last of them (`prefix_states.py`). An engine may keep neither.
"""

import math

import torch

from compress.kernels.operands.recurrent_states import rows_of_chunks
from compress.models.arch import Arch
from compress.runtime.block_pool import BlockPool
from compress.runtime.cache_plan import CachePlan
from compress.runtime.generation import Generation
from compress.runtime.kv_cache import chunk_multiple
from compress.runtime.prefix_cache import PrefixCache
from compress.runtime.prefix_states import PrefixStates, StateCopies
from compress.runtime.speculative.proposer import Proposer


class Prefixes:
    """The prefixes that a scheduler finds and leaves in the cache: none without `cache`.

    Prompts of more than `short_prompt_tokens` are long (`prefill.py`): those of one step run in one pass.
    """

    def __init__(
        self,
        cache: PrefixCache | None = None,
        states: PrefixStates | None = None,
        *,
        short_prompt_tokens: int = 0,
    ) -> None:
        self._cache = cache
        self._states = states
        self._short_prompt_tokens = short_prompt_tokens

    @property
    def num_queried(self) -> int:
        """Tokens of prompts that were looked up."""
        return 0 if self._cache is None else self._cache.num_queried

    @property
    def num_hits(self) -> int:
        """Tokens of prompts that were found."""
        return 0 if self._cache is None else self._cache.num_hits

    @property
    def chunk_multiple(self) -> int:
        """States are saved after a multiple of so many tokens."""
        return 1 if self._states is None else self._states.multiple

    @property
    def copies(self) -> StateCopies | None:
        """The copies of states in the step that is being scheduled, where sequences have some."""
        return None if self._states is None else self._states.copies

    def begin_step(self) -> None:
        """Begin to schedule a step."""
        if self._cache is not None:
            self._cache.begin_step()
        if self._states is not None:
            self._states.begin_step()

    def find(self, generation: Generation) -> list[int]:
        """Return the blocks from which a waiting request can go on, and note their number on it."""
        found: list[int] = []
        if self._cache is not None:
            found = self._cache.find(generation, long=self._is_long(generation))
        if self._states is not None:
            found = self._states.usable(generation, found)
        generation.num_cached_blocks = len(found)
        return found

    def awaits_state(self, first: Generation | None, generation: Generation) -> bool:
        """Return whether a waiting request is to go on from a state that is yet to be saved of `first`, which
        has the same prompt."""
        if self._states is None or first is None:
            return False
        return self._states.awaits(first, self.find(generation))

    def begin(self, generation: Generation) -> None:
        """Let a request that was just admitted go on from the blocks that it has, all of them found."""
        if self._states is not None and generation.blocks:
            self._states.begin(generation)

    def count(self, generation: Generation) -> None:
        """Count the prompt of a request that is admitted for the first time."""
        if self._cache is not None:
            self._cache.count(generation)

    def cut(self, generation: Generation, end: int) -> int:
        """Return where a chunk of a prompt ends that could reach `end`."""
        return end if self._states is None else self._states.cut(generation, end)

    def launch(self, generation: Generation, end: int) -> None:
        """Cache what the step that is being scheduled computes of a prompt, up to `end`."""
        if self._states is not None:
            self._states.save(generation, end)
        elif self._cache is not None:
            self._cache.insert(generation, end, long=self._is_long(generation))

    def leave(self, generation: Generation, num_tokens: int) -> None:
        """Cache the blocks of a request that is about to give them up, up to `num_tokens`. Blocks that need a
        state are cached with one, so not here."""
        if self._cache is not None and self._states is None:
            self._cache.insert(generation, num_tokens)

    def _is_long(self, generation: Generation) -> bool:
        return len(generation.request.prompt) > self._short_prompt_tokens


def keep_prefixes(
    arch: Arch,
    plan: CachePlan,
    pool: BlockPool,
    proposer: Proposer | None,
    *,
    kv_format: str,
    block_size: int,
    device: torch.device,
    short_prompt_tokens: int,
) -> Prefixes:
    """Return the prefixes of an engine that keeps them, none of them cached yet."""
    facts = (arch.family, arch.config, kv_format, plan.max_model_len)
    cache = PrefixCache(
        pool,
        block_size=block_size,
        salt="\n".join(map(str, facts)),
        num_rewritten_rows=0 if proposer is None else proposer.num_rewritten_rows,
        num_tokens_after=0 if proposer is None else proposer.num_tokens_after,
    )
    states = None
    if plan.saves_states:
        chunk = rows_of_chunks(any(map(arch.has_recurrence, ("mamba", "lightning"))), device)
        states = PrefixStates(
            cache,
            pool,
            block_size=block_size,
            multiple=math.lcm(chunk_multiple(kv_format), block_size, chunk),
            num_saved=plan.num_saved,
            chunk=chunk,
        )
    return Prefixes(cache, states, short_prompt_tokens=short_prompt_tokens)
