"""What runs in the next step: decodes first, then prefill chunks, under one budget of tokens; first come, first served.

- A decode costs one token, a prefill chunk as many as fit into what is left of the budget. A long prompt is cut into chunks, so that
  it never holds up running decodes for longer than one step.
- A request is admitted when a place is free and the blocks of all its tokens are: no later chunk of it can run out.
- A decode that finds no free block preempts the youngest running request: its blocks are freed, it waits at the head of the queue, and
  its keys and values are recomputed from its tokens when it is admitted again. The oldest request always proceeds, so all finish.
"""

from collections import deque
from dataclasses import dataclass, field

from compress.runtime.kv_cache import BlockAllocator
from compress.runtime.request import Reason, Request


@dataclass(eq=False)
class Generation:
    """A request in progress. `num_computed` leading tokens have their keys and values in `blocks`; it may have `end` tokens in all."""

    request: Request
    arrival_s: float
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    prefill_end: int = 0  # tokens to be prefilled since the last admission; later ones are decoded
    token_times_s: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = len(self.request.prompt) + self.request.params.max_tokens

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def num_left(self) -> int:
        """Tokens that may still be generated."""
        return self.end - len(self.tokens)

    @property
    def decoding(self) -> bool:
        return self.num_computed >= self.prefill_end

    def take(
        self, tokens: list[int], now_s: float, eos: frozenset[int], logprobs: list[float] | None = None
    ) -> Reason | None:
        """Go on with these tokens, up to one of `eos` or as many as are left: why it has ended, if it has."""
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
class Scheduled:
    """The next `num_tokens` tokens of one generation. It yields a token when they are its last known ones."""

    generation: Generation
    num_tokens: int

    @property
    def samples(self) -> bool:
        return self.generation.num_computed + self.num_tokens == len(self.generation.tokens)


@dataclass(frozen=True)
class Step:
    """Rows of the next forward: decodes, then prefill chunks."""

    decodes: tuple[Scheduled, ...]
    prefills: tuple[Scheduled, ...]


class Scheduler:
    """Queue, running set and the blocks they hold. Running requests stand in order of admission, oldest first."""

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
        return bool(self._waiting or self._running)

    @property
    def may_admit(self) -> bool:
        """Whether somebody waits and a place is free."""
        return bool(self._waiting) and len(self._running) < self._max_batch_size

    def add(self, generation: Generation) -> None:
        self._waiting.append(generation)

    def finish(self, generation: Generation) -> None:
        """Remove a generation from the queue or from the running set, and free its blocks."""
        (self._running if generation in self._running else self._waiting).remove(generation)
        self._release(generation)

    def extend(self, generation: Generation, num_tokens: int) -> bool:
        """Give a running generation the blocks that `num_tokens` tokens need, as far as there are free ones; whether it has them all."""
        missing = -(-num_tokens // self._block_size) - len(generation.blocks)
        if missing > 0:
            generation.blocks += self._allocator.allocate(min(missing, self._allocator.num_free))
        return num_tokens <= len(generation.blocks) * self._block_size

    def schedule(self) -> Step:
        """Choose the next step and allocate its blocks."""
        preemptions = self.num_preemptions
        decodes = self._schedule_decodes()
        budget = self._max_step_tokens - len(decodes)
        prefills: list[Scheduled] = []
        if (
            preemptions == self.num_preemptions
        ):  # what was just taken from a request is not given to a younger one
            self._admit(
                budget
                - sum(each.prefill_end - each.num_computed for each in self._running if not each.decoding)
            )
        for generation in self._running:
            if not generation.decoding and budget > 0:
                num_tokens = min(generation.prefill_end - generation.num_computed, budget)
                prefills.append(Scheduled(generation, num_tokens))
                budget -= num_tokens
        return Step(tuple(decodes), tuple(prefills))

    def _schedule_decodes(self) -> list[Scheduled]:
        decodes: list[Scheduled] = []
        for generation in [each for each in self._running if each.decoding]:
            while generation.blocks and self._num_missing(generation) > self._allocator.num_free:
                self._preempt(self._running[-1])
            if generation.blocks:  # else it was preempted itself, for an older one or as the youngest
                generation.blocks += self._allocator.allocate(self._num_missing(generation))
                decodes.append(Scheduled(generation, 1))
        return decodes

    def _admit(self, budget: int) -> None:
        """Admit from the head of the queue while places, blocks and budget last; whoever does not fit keeps all behind it waiting."""
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
