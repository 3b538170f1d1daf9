"""The scheduler: which requests the next step serves. First come, first served, within a budget of tokens.

- Decodes come first, then prefill chunks. A decode costs one token, a prefill chunk as many as fit into what
  is left of the budget. A long prompt is cut into chunks, so that it never delays running decodes by more
  than one step.
- A request is admitted when the batch has a free row and all its tokens have blocks, so that no later chunk
  of it can lack one.
- A decode that finds no free block preempts the youngest running request. That request loses its blocks,
  waits at the head of the queue, and its keys and values are recomputed from its tokens when it is admitted
  again. The oldest request always proceeds, so all finish.
"""

from collections import deque
from dataclasses import dataclass, field

from compress.runtime.kv_cache import BlockAllocator
from compress.runtime.request import Reason, Request


@dataclass(eq=False)
class Generation:
    """A request in progress: its tokens so far, prompt included, and the blocks of its keys and values.

    The keys and values of the first `num_computed` tokens are in `blocks`. `prefill_end` tokens are prefilled
    after the last admission, and later ones are decoded. It may have `end` tokens in all.
    """

    request: Request
    arrival_s: float
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    prefill_end: int = 0
    token_times_s: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = len(self.request.prompt) + self.request.params.max_tokens

    @property
    def generated(self) -> list[int]:
        """Tokens generated so far, without the prompt."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def num_left(self) -> int:
        """Number of tokens that may still be generated."""
        return self.end - len(self.tokens)

    @property
    def decoding(self) -> bool:
        """Whether its prefill is complete."""
        return self.num_computed >= self.prefill_end

    def append(
        self, tokens: list[int], now_s: float, eos: frozenset[int], logprobs: list[float] | None = None
    ) -> Reason | None:
        """Append new tokens, up to one of `eos` or as many as are left; return why the request ended, if it
        did.
        """
        reason: Reason | None = None
        if len(self.tokens) + len(tokens) >= self.end or not eos.isdisjoint(tokens):
            tokens, reason = self._until_end(tokens, eos)
        self.tokens += tokens
        self.token_times_s += [now_s] * len(tokens)
        self.num_computed = len(self.tokens) - 1
        if logprobs is not None:
            self.logprobs += logprobs[: len(tokens)]
        return reason

    def _until_end(self, tokens: list[int], eos: frozenset[int]) -> tuple[list[int], Reason | None]:
        tokens = tokens[: self.num_left]
        stops = (
            []
            if self.request.params.ignore_eos
            else [place for place, token in enumerate(tokens) if token in eos]
        )
        if stops:
            return tokens[: stops[0] + 1], "stop"
        return tokens, "length" if len(tokens) == self.num_left else None


@dataclass(frozen=True)
class PrefillChunk:
    """The next `num_tokens` tokens of a generation that is being prefilled."""

    generation: Generation
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether it ends with the last known token, so that the model's logits choose the next one."""
        return self.generation.num_computed + self.num_tokens == len(self.generation.tokens)


@dataclass(frozen=True)
class Batch:
    """The work of one step: requests to decode, and chunks of prompts to prefill."""

    decodes: tuple[Generation, ...]
    prefills: tuple[PrefillChunk, ...]


class Scheduler:
    """The queue of waiting requests, the running ones in order of admission, and the blocks they hold."""

    def __init__(
        self, allocator: BlockAllocator, *, block_size: int, max_batch_size: int, max_step_tokens: int
    ) -> None:
        assert max_step_tokens >= max_batch_size, "every running request must be able to decode in one step"
        self._allocator = allocator
        self._block_size = block_size
        self._max_batch_size = max_batch_size
        self._max_step_tokens = max_step_tokens
        self._waiting: deque[Generation] = deque()
        self._running: list[Generation] = []
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def may_admit(self) -> bool:
        """Whether a request waits and the batch has a free row."""
        return bool(self._waiting) and len(self._running) < self._max_batch_size

    def add(self, generation: Generation) -> None:
        """Append a generation to the queue."""
        self._waiting.append(generation)

    def finish(self, generation: Generation) -> None:
        """Remove a generation from the queue or from the running set, and free its blocks."""
        (self._running if generation in self._running else self._waiting).remove(generation)
        self._release(generation)

    def extend(self, generation: Generation, num_tokens: int) -> bool:
        """Give a running generation the blocks for `num_tokens` tokens, as far as any are free; return
        whether it has them all.
        """
        missing = -(-num_tokens // self._block_size) - len(generation.blocks)
        if missing > 0:
            generation.blocks += self._allocator.allocate(min(missing, self._allocator.num_free))
        return num_tokens <= len(generation.blocks) * self._block_size

    def schedule(self) -> Batch:
        """Choose what the next step serves, and allocate its blocks."""
        preemptions = self.num_preemptions
        decodes = self._schedule_decodes()
        budget = self._max_step_tokens - len(decodes)
        if preemptions == self.num_preemptions:  # blocks just taken from a request are not for a younger one
            unfinished = [each for each in self._running if not each.decoding]
            self._admit(budget - sum(each.prefill_end - each.num_computed for each in unfinished))
        prefills: list[PrefillChunk] = []
        for generation in self._running:
            if not generation.decoding and budget > 0:
                num_tokens = min(generation.prefill_end - generation.num_computed, budget)
                prefills.append(PrefillChunk(generation, num_tokens))
                budget -= num_tokens
        return Batch(tuple(decodes), tuple(prefills))

    def _schedule_decodes(self) -> list[Generation]:
        decodes: list[Generation] = []
        for generation in [each for each in self._running if each.decoding]:
            while generation.blocks and self._num_missing(generation) > self._allocator.num_free:
                self._preempt(self._running[-1])
            if generation.blocks:  # otherwise it was preempted, for an older request or as the youngest
                generation.blocks += self._allocator.allocate(self._num_missing(generation))
                decodes.append(generation)
        return decodes

    def _admit(self, budget: int) -> None:
        """Admit requests from the head of the queue while rows, blocks and budget last; never skip one that
        does not fit.
        """
        while self._waiting and budget > 0 and len(self._running) < self._max_batch_size:
            generation = self._waiting[0]
            if self._num_missing(generation) > self._allocator.num_free:
                return
            self._waiting.popleft()
            generation.blocks = self._allocator.allocate(self._num_missing(generation))
            generation.prefill_end = len(generation.tokens)
            self._running.append(generation)
            budget -= generation.prefill_end

    def _num_missing(self, generation: Generation) -> int:
        return -(-len(generation.tokens) // self._block_size) - len(generation.blocks)

    def _preempt(self, generation: Generation) -> None:
        self._running.remove(generation)
        self._release(generation)
        generation.num_computed = 0
        self._waiting.appendleft(generation)
        self.num_preemptions += 1

    def _release(self, generation: Generation) -> None:
        self._allocator.free(generation.blocks)
        generation.blocks = []
