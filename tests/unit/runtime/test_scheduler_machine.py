"""Any order of arrivals, steps and cancellations: no block leaks, none is freed twice, nobody starves, and
every row attends to the keys and values of its own sequence. Steps begin before or after the last one is
read, requests end by length or by a token that is seen late, and groups of them share a prompt.

A cache without a model stands for the real one: a position holds the digest of all tokens up to it, written
when its row is computed. What a row reads must be the digests of its own sequence, whoever wrote them. With
a head, a position also holds the digest of the tokens up to the one after it. Steps write the last of these
again, which is never in a block that is cached.
"""

from collections import deque
from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from compress.errors import QueueFull
from compress.runtime.batching import POLICIES, Batching
from compress.runtime.block_pool import BlockPool
from compress.runtime.generation import Generation
from compress.runtime.prefix_cache import PrefixCache
from compress.runtime.prefix_states import PrefixStates, StateCopies
from compress.runtime.prefixes import Prefixes
from compress.runtime.request import Request, SamplingParams
from compress.runtime.scheduled import Batch, PrefillChunk
from compress.runtime.scheduler import Scheduler
from compress.runtime.waiting_queue import WaitingQueue

BLOCK = 4
STOP = 2
SHORT = 6
"""Prompts up to this length run in passes of their own, before the long ones."""


class Cells:
    """What each position of each block holds, and the host memory that blocks are swapped to."""

    def __init__(self, num_slots: int) -> None:
        self.cells: dict[tuple[int, int], int] = {}
        self.head_rows: dict[tuple[int, int], int] = {}
        self.sequences: dict[Generation, list[int]] = {}
        """The tokens of each request as the device knows them: the host has read the first of them."""
        self.states: dict[int, int] = {}
        """What the state of each sequence that has one holds, by its first block."""
        self.saved: dict[int, int] = {}
        self.wanted: dict[int, list[tuple[int, int]]] = {}
        self._num_slots = num_slots
        self._held: dict[Generation, tuple[list[list[int]], int]] = {}

    def write(self, generation: Generation, start: int, end: int) -> None:
        for position in range(start, end):
            self.cells[self._place(generation, position)] = self._digest(generation, position)

    def write_head(self, generation: Generation, start: int, end: int) -> None:
        """Write the head's rows of these positions whose next token is known to the host."""
        for position in range(start, min(end, len(generation.tokens) - 1)):
            self.head_rows[self._place(generation, position)] = self._digest(generation, position + 1)

    def propose(self, generation: Generation, pool: BlockPool, num_rewritten_rows: int) -> None:
        """Write the rows of the last tokens again, read all, and write rows of tokens that are proposed."""
        length = len(self.sequences[generation])
        for position in range(max(0, length - 1 - num_rewritten_rows), length - 1):
            place = self._place(generation, position)
            assert place[0] not in pool._cached
            self.head_rows[place] = self._digest(generation, position + 1)
        for position in range(length - 1):
            assert self.head_rows[self._place(generation, position)] == self._digest(generation, position + 1)
        for position in range(
            length - 1, min(length + num_rewritten_rows - 3, len(generation.blocks) * BLOCK)
        ):
            place = self._place(generation, position)
            assert place[0] not in pool._cached
            self.head_rows[place] = -1

    def advance(self, generation: Generation, start: int, end: int) -> None:
        """Take the state of a sequence on; it must be that after the first `start` tokens."""
        slot = generation.blocks[0]
        assert start == 0 or self.states[slot] == self._digest(generation, start - 1)
        self.states[slot] = self._digest(generation, end - 1)
        for place, num_tokens in self.wanted.pop(slot, []):
            assert start < num_tokens <= end
            self.saved[place] = self._digest(generation, num_tokens - 1)

    def begin_states(self, copies: StateCopies) -> None:
        self.copy(copies.blocks)
        self.states.update({slot: self.saved[place] for slot, place, _ in copies.restored})
        self.wanted = {slot: [(place, num_tokens)] for slot, place, num_tokens in copies.saved}
        assert len(self.wanted) == len({each.place for each in copies.saved}) == len(copies.saved)

    def end_states(self, copies: StateCopies) -> None:
        assert not self.wanted
        self.copy(copies.firsts)

    def check(self, generation: Generation, end: int) -> None:
        for position in range(end):
            assert self.cells[self._place(generation, position)] == self._digest(generation, position)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        for cells in (self.cells, self.head_rows):
            contents = [[cells.get((block, idx)) for idx in range(BLOCK)] for block, _ in copies]
            for (_, block), content in zip(copies, contents, strict=True):
                for idx, cell in enumerate(content):
                    cells.pop((block, idx), None)
                    if cell is not None:
                        cells[block, idx] = cell

    def _place(self, generation: Generation, position: int) -> tuple[int, int]:
        return generation.blocks[position // BLOCK], position % BLOCK

    def _digest(self, generation: Generation, position: int) -> int:
        return hash(tuple(self.sequences[generation][: position + 1]))

    def store(self, generation: Generation) -> bool:
        used = generation.blocks[: -(-generation.num_computed // BLOCK)]
        if self.num_used + len(used) > self._num_slots:
            return False
        contents = [[self.cells.get((block, idx), 0) for idx in range(BLOCK)] for block in used]
        self._held[generation] = (contents, generation.num_computed)
        return True

    def holds(self, generation: Generation) -> bool:
        return generation in self._held

    def restore(self, generation: Generation) -> int:
        contents, num_tokens = self._held.pop(generation)
        for block, content in zip(generation.blocks, contents, strict=False):
            self.cells.update({(block, idx): cell for idx, cell in enumerate(content)})
        return num_tokens

    def drop(self, generation: Generation) -> None:
        self._held.pop(generation, None)

    @property
    def num_used(self) -> int:
        return sum(len(contents) for contents, _ in self._held.values())


class ClearingPool(BlockPool):
    """A pool whose blocks hold nothing when they are taken."""

    cells: Cells

    def allocate(self, count: int, *, begins: bool = False) -> list[int]:
        blocks = super().allocate(count, begins=begins)
        for block in blocks:
            self.cells.states.pop(block, None)
        for place in [(block, idx) for block in blocks for idx in range(BLOCK)]:
            self.cells.cells.pop(place, None)
            self.cells.head_rows.pop(place, None)
        return blocks


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps and cancellations over one scheduler with settings of any kind."""

    num_restored = 0
    """States that were restored in all runs."""
    num_hits = 0
    """Tokens of prompts that were found with a head's rows of them in all runs."""

    @initialize(
        num_blocks=st.integers(8, 16),
        batch_size=st.integers(2, 5),
        budget=st.integers(5, 40),
        shortest_first=st.booleans(),
        prefixes=st.sampled_from([True, True, True, False]),
        policy=st.sampled_from(["continuous", "continuous", *POLICIES]),
        num_slots=st.sampled_from([0, 3, 50]),
        num_saved=st.sampled_from([None, None, 0, 1, 4]),
        multiple=st.sampled_from([BLOCK, 2 * BLOCK]),
        num_rewritten_rows=st.sampled_from([0, 0, 2, 4]),
    )
    def begin(
        self,
        num_blocks: int,
        batch_size: int,
        budget: int,
        shortest_first: bool,
        prefixes: bool,
        policy: str,
        num_slots: int,
        num_saved: int | None,
        multiple: int,
        num_rewritten_rows: int,
    ) -> None:
        self.has_states = has_states = num_saved is not None
        self.num_first = num_first = batch_size if has_states else 0
        self.num_rewritten_rows = num_rewritten_rows
        num_slots = 0 if has_states or num_rewritten_rows else num_slots
        self.num_blocks = num_blocks
        self.pool = ClearingPool(num_blocks + num_first + 1, num_first=num_first)
        self.pool.cells = self.cells = Cells(num_slots)
        self.batching = Batching(batch_size, policy=policy, delay_s=3.0)  # type: ignore[arg-type]
        self.prefixes = (
            PrefixCache(
                self.pool,
                block_size=BLOCK,
                salt="",
                num_rewritten_rows=num_rewritten_rows,
                num_tokens_after=min(num_rewritten_rows, 1),
            )
            if prefixes
            else None
        )
        self.num_saved = num_saved
        self.states = states = None
        if num_saved is not None and self.prefixes is not None:
            self.states = states = PrefixStates(
                self.prefixes,
                self.pool,
                block_size=BLOCK,
                multiple=multiple,
                num_saved=num_saved,
                least_tokens=BLOCK,
                chunk=BLOCK,
            )
        self.scheduler = Scheduler(
            self.pool,
            WaitingQueue(shortest_first=shortest_first, limit=6),
            block_size=BLOCK,
            max_batch_size=batch_size,
            max_step_tokens=max(budget, batch_size),
            batching=self.batching,
            prefixes=Prefixes(self.prefixes, states, short_prompt_tokens=SHORT),
            num_unsure=num_rewritten_rows,
            swap=self.cells if num_slots else None,
            shares_prompts=not has_states and not num_rewritten_rows,
            chunk_multiple=1 if states is None else multiple,
        )
        self.now_s = 0.0
        self.alive: list[Generation] = []
        self.launched: deque[tuple[list[Generation], list[Generation]]] = deque()
        self.num_arrived = 0
        self.num_done = 0
        self.num_chosen = 0

    @rule(
        lengths=st.lists(st.integers(1, 18), min_size=1, max_size=4),
        last=st.sampled_from([(), (), (1,)]),
        max_tokens=st.integers(1, 6),
        priority=st.integers(-1, 1),
    )
    def arrive(self, lengths: list[int], last: tuple[int, ...], max_tokens: int, priority: int) -> None:
        """Some requests come, most of which begin alike."""
        for length in lengths:
            self._arrive((7,) * length + last, max_tokens, priority)

    @rule(length=st.integers(1, 18), limits=st.lists(st.integers(1, 6), min_size=2, max_size=4))
    def ask_for_several(self, length: int, limits: list[int]) -> None:
        """Several completions of one prompt come."""
        group = str(self.num_arrived)
        for max_tokens in limits:
            self._arrive((9, *(7,) * length), max_tokens, 0, group)

    def _arrive(
        self, prompt: tuple[int, ...], max_tokens: int, priority: int, group: str | None = None
    ) -> None:
        name = str(self.num_arrived)
        request = Request(name, prompt, SamplingParams(max_tokens), priority=priority, group=group)
        generation = Generation(request, self.now_s, list(prompt))
        self.num_arrived += 1
        try:
            self.scheduler.add(generation)
        except QueueFull:
            self.num_arrived -= 1
            return
        self.alive.append(generation)
        self.cells.sequences[generation] = list(prompt)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        generation = data.draw(st.sampled_from(self.alive))
        self._end(generation)

    @rule(most=st.sampled_from([None, 1, 5]), ahead=st.booleans(), stops_every=st.sampled_from([0, 0, 3, 7]))
    def step(self, most: int | None, ahead: bool, stops_every: int) -> None:
        self.now_s += 1.0
        if not ahead or self.scheduler.decodes_ahead() is None:
            self._read(0)
        preemptions = self.scheduler.num_preemptions
        unread = len(self.launched)
        self._launch(self.scheduler.schedule(self.now_s, max_prefill_tokens=most), stops_every)
        assert not unread or preemptions == self.scheduler.num_preemptions
        self._read(int(ahead))

    def _launch(self, batch: Batch, stops_every: int) -> None:
        self.cells.copy(batch.copies)
        if batch.states is not None:
            self.cells.begin_states(batch.states)
            SchedulerMachine.num_restored += len(batch.states.restored)
        for generation in batch.decodes:
            length = generation.length
            assert length > len(generation.request.prompt)  # its prompt chose the first token
            assert length < generation.end
            self.cells.write(generation, length - 1, length)
            if self.has_states:
                self.cells.advance(generation, length - 1, length)
            self.cells.check(generation, length)
            if self.num_rewritten_rows:
                self.cells.propose(generation, self.pool, self.num_rewritten_rows)
            generation.num_computed += 1
        short = [each for each in batch.prefills if len(each.generation.request.prompt) <= SHORT]
        firsts: list[Generation] = []
        for chunks in (short, [each for each in batch.prefills if each not in short]):
            firsts += self._prefill(chunks)
        if batch.states is not None:
            self.cells.end_states(batch.states)
        for generation in (*batch.decodes, *firsts):
            self.num_chosen += 1
            stops = stops_every and self.num_chosen % stops_every == 0
            sequence = self.cells.sequences[generation]
            assert len(sequence) == generation.length
            request = generation.request
            own = 7 if request.group is None else 10 + int(request.id)  # completions of a prompt differ
            sequence.append(STOP if stops else own)
            generation.num_pending += 1
        self.launched.append((list(batch.decodes), firsts))

    def _prefill(self, chunks: list[PrefillChunk]) -> list[Generation]:
        """Compute the chunks of a pass; return whose prompts it completes."""
        spans = [
            (each.generations, each.generation.num_computed, each.num_tokens, each.is_last) for each in chunks
        ]
        for generations, start, count, _ in spans:
            assert count > 0
            assert all(each.num_computed == start for each in generations)
            assert all(each.blocks == generations[0].blocks for each in generations)
            self.cells.write(generations[0], start, start + count)
            self.cells.write_head(generations[0], start, start + count)
            if self.has_states:
                self.cells.advance(generations[0], start, start + count)
        for generations, start, count, _ in spans:
            for each in generations:
                self.cells.check(each, start + count)
                each.num_computed = start + count
        return [each for generations, _, _, is_last in spans if is_last for each in generations]

    def _read(self, num_left: int) -> None:
        """Read the steps that were launched, but for the last `num_left`."""
        while len(self.launched) > num_left:
            for generation in (one for part in self.launched.popleft() for one in part):
                if not generation.ended:
                    token = self.cells.sequences[generation][len(generation.tokens)]
                    if generation.append([token], self.now_s, frozenset([STOP])) is not None:
                        self._end(generation)

    def _end(self, generation: Generation) -> None:
        self.scheduler.finish(generation)
        self.alive.remove(generation)
        self.num_done += 1

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        held = {block for each in self.alive for block in each.blocks}
        held |= {each.first_copy for each in self.alive if each.first_copy is not None}
        assert self.pool.num_held == len(held)
        assert sum(block > self.num_first for block in held) + self.pool.num_free == self.num_blocks
        assert 0 not in held
        if self.states is not None:
            assert len(self.states._free) + len(self.states._places) == self.num_saved
        assert 0 <= self.scheduler.live_tokens <= self.scheduler.reserved_positions
        num_over = sum(each.is_complete for each in self.alive if not each.blocks and each.num_pending)
        assert self.scheduler.num_running + self.scheduler.num_waiting + num_over == len(self.alive)

    def teardown(self) -> None:
        """Everybody who waits or runs ends, and nothing is left."""
        if not hasattr(self, "scheduler"):
            return
        self.batching.flush = True
        for _ in range(3_000):
            if not self.scheduler.has_work and not self.launched:
                break
            self.step(None, ahead=self.scheduler.has_work and self.num_arrived % 2 > 0, stops_every=0)
            self.every_block_is_in_one_place()
        assert not self.alive
        assert self.num_done == self.num_arrived
        assert self.pool.num_free == self.num_blocks
        assert self.cells.num_used == 0
        if self.num_rewritten_rows and self.prefixes is not None:
            SchedulerMachine.num_hits += self.prefixes.num_hits


def test_any_order_of_arrivals_steps_and_cancellations() -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=250,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    assert SchedulerMachine.num_restored > 0
    assert SchedulerMachine.num_hits > 0
