"""The scheduler: which requests the next step serves, within a budget of tokens.

- Decodes come first, then prefill chunks. A decode costs one token, a prefill chunk as many as fit into what
  is left of the budget. A long prompt is cut into chunks, so that it never delays running decodes by more
  than one step.
- Requests are admitted in the order of the queue (`waiting_queue.py`), when the batching policy lets them
  (`batching.py`), the batch has a free row and all their tokens have blocks, so that no later chunk of them
  can lack one. Blocks that the prefix cache finds are shared.
- A decode that finds no free block preempts the running request that was admitted last of those with the
  highest `priority` value. That request loses its blocks and waits before all others. Its keys and values are
  recomputed from its tokens when it is admitted again, or taken back from host memory (`swap.py`). The first
  admitted of the most urgent requests always proceeds, so all finish.
- Requests of one group with the same prompt share all its blocks and its prefill chunks, if they are admitted
  before those are done: the first is their leader. A block that several hold is copied when one of them is
  about to write to it (`Batch.copies`).
- A step may be scheduled before the tokens of the last one are read, unless it has to preempt
  (`decodes_ahead`). A request that has its last token with the last step gives up its row and its blocks
  then: the device does steps in order, so nobody writes to them before it has done that one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from compress.runtime.batching import Batching
from compress.runtime.block_pool import BlockPool
from compress.runtime.generation import Generation
from compress.runtime.prefixes import Prefixes
from compress.runtime.scheduled import Batch, PrefillChunk
from compress.runtime.waiting_queue import WaitingQueue


class Swap(Protocol):
    """A place outside the cache for the keys and values of requests that lose their blocks."""

    def store(self, generation: Generation) -> bool:
        """Copy the blocks of a request that is about to lose them; return whether there was room."""

    def holds(self, generation: Generation) -> bool:
        """Return whether the keys and values of a request are here."""

    def restore(self, generation: Generation) -> int:
        """Copy them into the request's new blocks; return how many tokens they cover."""

    def drop(self, generation: Generation) -> None:
        """Forget a request that has ended, if it is here."""


class Scheduler:
    """The queue of waiting requests, the running ones in order of admission, and the blocks they hold.

    A chunk ends with its prompt or after a multiple of `chunk_multiple` tokens of it; where a step has no
    room for so many, it ends with that room. Nobody overtakes a prompt that has to wait for the next step.
    """

    def __init__(
        self,
        pool: BlockPool,
        queue: WaitingQueue | None = None,
        *,
        block_size: int,
        max_batch_size: int,
        max_step_tokens: int,
        batching: Batching | None = None,
        prefixes: Prefixes | None = None,
        num_unsure: int = 0,
        swap: Swap | None = None,
        shares_prompts: bool = True,
        chunk_multiple: int = 1,
    ) -> None:
        assert max_step_tokens >= max_batch_size, "every running request must be able to decode in one step"
        self._pool = pool
        self._waiting = queue if queue is not None else WaitingQueue()
        self._block_size = block_size
        self._max_batch_size = max_batch_size
        self._max_step_tokens = max_step_tokens
        self._batching = batching if batching is not None else Batching(max_batch_size)
        self._prefixes = prefixes if prefixes is not None else Prefixes()
        self._num_unsure = num_unsure
        self._swap = swap
        self._shares_prompts = shares_prompts
        self._chunk_multiple = chunk_multiple
        self._running: list[Generation] = []
        self._copies: dict[Generation, tuple[int, int]] = {}
        """Copies of the step that is being scheduled, by the request that writes to the second block."""
        self.num_preemptions = 0
        self.num_shared = 0
        self.num_copied = 0

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def running(self) -> Sequence[Generation]:
        """The requests that have a row of the batch, in the order in which they were admitted."""
        return self._running

    @property
    def num_running(self) -> int:
        """Number of requests that have a row of the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._waiting)

    @property
    def reserved_positions(self) -> int:
        """Positions in blocks that requests hold."""
        return self._pool.num_held * self._block_size

    @property
    def live_tokens(self) -> int:
        """Positions among those that hold keys and values of a request; a shared block counts once."""
        unused = {
            each.blocks[-1]: len(each.blocks) * self._block_size - each.num_computed for each in self._running
        }
        return self.reserved_positions - sum(unused.values())

    def may_admit(self, now_s: float) -> bool:
        """Return whether the next step would admit a request from the queue."""
        if not self._waiting or len(self._running) >= self._max_batch_size:
            return False
        if not self._batching.is_open(self._waiting, len(self._running), now_s):
            return False
        head = self._waiting.head()
        if self._awaits_state(head):
            return False
        return self._pool.num_free > 0 if self._leader(head) else self._fits(head, self._found(head))

    def add(self, generation: Generation) -> None:
        """Append a generation to the queue.

        Raises:
            QueueFull: as many requests wait as may.
        """
        self._waiting.add(generation)

    def finish(self, generation: Generation) -> None:
        """Remove a generation from the queue or from the running set, where it still is, and free its
        blocks.
        """
        if generation in self._running:
            self._leave(generation)
        elif generation in self._waiting:
            self._waiting.remove(generation)
        generation.ended = True
        self._batching.left(len(self._waiting))
        if self._swap is not None:
            self._swap.drop(generation)

    def extend(self, generation: Generation, num_tokens: int) -> bool:
        """Give a running generation the blocks for `num_tokens` tokens, as far as any are free; return
        whether it has them all.
        """
        missing = -(-num_tokens // self._block_size) - len(generation.blocks)
        if missing > 0:
            generation.blocks += self._pool.allocate(min(missing, self._pool.num_free))
        return num_tokens <= len(generation.blocks) * self._block_size

    def decodes_ahead(self) -> list[Generation] | None:
        """Return the requests that the next step decodes if it is scheduled before the last one is read, or
        None where it would have to preempt one: what has to be kept of that is known when it is read.
        """
        self._retire()
        decodes = [each for each in self._running if each.decoding]
        missing = sum(self._num_missing(each) for each in decodes)
        return decodes if missing <= self._pool.num_free else None

    def schedule(self, now_s: float = 0.0, *, max_prefill_tokens: int | None = None) -> Batch:
        """Choose what the next step serves, and allocate its blocks. Beside decodes, prefill
        chunks have at most `max_prefill_tokens` in all (None: what the budget leaves).

        What is chosen runs at once: later requests of the same step may share its blocks.
        """
        self._prefixes.begin_step()
        self._retire()
        self._copies.clear()
        preemptions = self.num_preemptions
        decodes = self._schedule_decodes()
        budget = self._max_step_tokens - len(decodes)
        if decodes and max_prefill_tokens is not None:
            budget = min(budget, max_prefill_tokens)
        prefills: list[PrefillChunk] = []
        prefilling = self._prefilling(now_s, admits=preemptions == self.num_preemptions)
        while budget > 0 and (generation := next(prefilling, None)) is not None:
            num_tokens = self._chunk_tokens(generation, budget, must=not prefills)
            if num_tokens == 0:
                break
            prefills.append(PrefillChunk(generation, num_tokens))
            budget -= num_tokens
            self._prefixes.launch(generation, generation.num_computed + num_tokens)
        self.num_copied += len(self._copies)
        return Batch(
            tuple(decodes),
            tuple(map(self._with_followers, prefills)),
            tuple(self._copies.values()),
            self._prefixes.copies,
        )

    def _chunk_tokens(self, generation: Generation, budget: int, *, must: bool) -> int:
        """Return how many tokens of a request the next chunk takes; with `must`, some."""
        begin = generation.num_computed
        end = self._prefixes.cut(generation, min(generation.prefill_end, begin + budget))
        if end < generation.prefill_end and not (must and budget < self._chunk_multiple):
            end = max(begin, end // self._chunk_multiple * self._chunk_multiple)
        return end - begin

    def _prefilling(self, now_s: float, *, admits: bool) -> Iterator[Generation]:
        """Yield the running requests whose prefill is not complete, then admit others, one at a time.

        Blocks just taken from a request are not for a younger one: then none is admitted.
        """
        yield from [each for each in self._running if not each.decoding and each.leader is None]
        while admits and (generation := self._admit(now_s)) is not None:
            self._admit_followers(now_s)
            if not generation.decoding and generation.leader is None:
                yield generation

    def _admit_followers(self, now_s: float) -> None:
        """Admit those at the head of the queue that share the prompt of a running request, so that they do so
        from its first chunk on."""
        while self._waiting and self._leader(self._waiting.head()):
            if self._admit(now_s) is None:
                return

    def _with_followers(self, chunk: PrefillChunk) -> PrefillChunk:
        if chunk.generation.request.group is None:
            return chunk
        return replace(chunk, followers=tuple(self._followers(chunk.generation)))

    def _followers(self, leader: Generation) -> list[Generation]:
        return [each for each in self._running if each.follows(leader)]

    def _leader(self, generation: Generation) -> Generation | None:
        """Return the request whose chunks a waiting request may share, if there is one."""
        return self._first_of_group(generation) if self._shares_prompts else None

    def _awaits_state(self, generation: Generation) -> bool:
        """Return whether a waiting request is to go on from a state that is yet to be saved."""
        return self._prefixes.awaits_state(self._first_of_group(generation), generation)

    def _first_of_group(self, generation: Generation) -> Generation | None:
        """Return the request of the same group and prompt that is being prefilled, if there is one."""
        group = generation.request.group
        if group is None or generation.generated:
            return None
        for each in self._running:
            leads = each.request.group == group and each.leader is None and not each.decoding
            if leads and each.tokens == generation.tokens:
                return each
        return None

    def _schedule_decodes(self) -> list[Generation]:
        decodes: list[Generation] = []
        for generation in [each for each in self._running if each.decoding]:
            while generation.blocks and self._num_missing(generation) > self._pool.num_free:
                self._preempt(max(reversed(self._running), key=lambda each: each.request.priority))
            if generation.blocks:  # otherwise it was preempted itself
                self._own_last_block(generation)
                if (missing := self._num_missing(generation)) > 0:
                    generation.blocks += self._pool.allocate(missing)
                decodes.append(generation)
        return [each for each in decodes if each.blocks]

    def _writes_shared(self, generation: Generation) -> bool:
        """Return whether others hold the block that the next decode of a request writes to."""
        if generation.request.group is None:
            return False
        idx = (generation.length - 1) // self._block_size
        return idx < len(generation.blocks) and self._pool.is_shared(generation.blocks[idx])

    def _own_last_block(self, generation: Generation) -> None:
        """Give a request a copy of the block that it is about to write to, if others hold that too."""
        if self._writes_shared(generation):
            shared = generation.blocks[-1]
            (own,) = self._pool.allocate(1)
            self._pool.free([shared])
            generation.blocks[-1] = own
            self._copies[generation] = shared, own

    def _admit(self, now_s: float) -> Generation | None:
        """Admit the request whose turn it is, where row and blocks are free; never skip one that does not
        fit.
        """
        if not self._waiting or len(self._running) >= self._max_batch_size:
            return None
        if not self._batching.is_open(self._waiting, len(self._running), now_s):
            return None
        generation = self._waiting.head()
        if self._awaits_state(generation):
            return None
        leader = self._leader(generation)
        if leader is not None:
            return self._join(generation, leader, now_s) if self._pool.num_free else None
        found = self._found(generation)
        if not self._fits(generation, found):
            return None
        self._enter(generation, found, num_cached_blocks=generation.num_cached_blocks)
        self._prefixes.begin(generation)
        generation.blocks += self._pool.allocate(self._num_missing(generation), begins=not found)
        generation.num_computed = generation.num_cached_blocks * self._block_size
        if self._swap is not None and self._swap.holds(generation):
            generation.num_computed = generation.prefill_end = self._swap.restore(generation)
        self._note_admission(generation, generation.num_computed, now_s)
        return generation

    def _join(self, generation: Generation, leader: Generation, now_s: float) -> Generation:
        """Admit a request to the blocks and the chunks of its leader. One block is free for what follows."""
        self._enter(generation, leader.blocks, num_cached_blocks=leader.num_cached_blocks)
        generation.leader = leader
        generation.num_computed = leader.num_computed
        self.num_shared += 1
        self._note_admission(generation, leader.cached_tokens, now_s)
        return generation

    def _enter(self, generation: Generation, blocks: Sequence[int], *, num_cached_blocks: int) -> None:
        """Give the next of the queue a row of the batch, and a share of these blocks."""
        self._waiting.take()
        self._batching.admitted()
        self._pool.share(blocks)
        generation.blocks = list(blocks)
        generation.num_cached_blocks = num_cached_blocks
        generation.prefill_end = len(generation.tokens)
        self._running.append(generation)

    def _note_admission(self, generation: Generation, cached_tokens: int, now_s: float) -> None:
        if generation.admitted_s is None:
            generation.admitted_s = now_s
            generation.cached_tokens = cached_tokens
            self._prefixes.count(generation)

    def _found(self, generation: Generation) -> list[int]:
        """Return the blocks of the prefix cache that hold the beginning of a waiting request."""
        if self._swap is not None and self._swap.holds(generation):
            generation.num_cached_blocks = 0
            return []
        return self._prefixes.find(generation)

    def _fits(self, generation: Generation, found: list[int]) -> bool:
        missing = self._num_missing(generation) - len(found)
        return missing <= self._pool.num_free - self._pool.num_evictable_of(found)

    def _retire(self) -> None:
        """Take the row and the blocks of requests that have all tokens once the last step is read."""
        for generation in [each for each in self._running if each.is_complete]:
            self._leave(generation)

    def _num_missing(self, generation: Generation) -> int:
        missing = -(-generation.length // self._block_size) - len(generation.blocks)
        return missing + self._writes_shared(generation)

    def _leave(self, generation: Generation) -> None:
        self._running.remove(generation)
        if generation.request.group is not None:
            followers = self._followers(generation)
            for each in followers:  # all have come as far: the first goes on
                each.leader = None if each is followers[0] else followers[0]
            generation.leader = None
        self._release(generation)

    def _preempt(self, generation: Generation) -> None:
        # A block that is yet to be copied to holds nothing that could be stored.
        copied = self._copies.pop(generation, None) is not None
        if self._swap is not None and generation.decoding and not copied:
            self._swap.store(generation)
        self._leave(generation)
        generation.num_computed = 0
        self._waiting.put_back(generation)
        self.num_preemptions += 1

    def _release(self, generation: Generation) -> None:
        if generation.blocks:
            self._prefixes.leave(generation, generation.num_computed - self._num_unsure)
        first = [] if generation.first_copy is None else [generation.first_copy]
        self._pool.free([*first, *generation.blocks])
        generation.blocks = []
        generation.first_copy = None
