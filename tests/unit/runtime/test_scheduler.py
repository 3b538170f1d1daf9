"""What runs in a step: decodes first, chunks within the budget, first come first served, preemption of the
youngest.
"""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.runtime.block_pool import BlockPool
from compress.runtime.generation import Generation
from compress.runtime.request import Request, SamplingParams
from compress.runtime.scheduled import Batch
from compress.runtime.scheduler import Scheduler

BLOCK_SIZE = 16


@dataclass
class Bench:
    """A scheduler driven without a model: every row that samples appends token 0."""

    scheduler: Scheduler
    allocator: BlockPool
    done: list[str]

    def add(self, name: str, prompt_len: int, max_tokens: int = 50) -> None:
        request = Request(name, (1,) * prompt_len, SamplingParams(max_tokens))
        self.scheduler.add(Generation(request, 0.0, list(request.prompt)))

    def step(self) -> tuple[list[str], list[tuple[str, int]]]:
        """(decodes, prefill chunks) by name."""
        batch = self.scheduler.schedule()
        shown = (
            [each.request.id for each in batch.decodes],
            [(each.generation.request.id, each.num_tokens) for each in batch.prefills],
        )
        self._run(batch)
        return shown

    def _run(self, batch: Batch) -> None:
        decodes = [(each, 1, True) for each in batch.decodes]
        prefills = [(each.generation, each.num_tokens, each.is_last) for each in batch.prefills]
        for generation, num_tokens, samples in (*decodes, *prefills):
            assert len(generation.blocks) * BLOCK_SIZE >= generation.num_computed + num_tokens
            generation.num_computed += num_tokens
            if samples:
                generation.tokens.append(0)
                if len(generation.generated) == generation.request.params.max_tokens:
                    self.scheduler.finish(generation)
                    self.done.append(generation.request.id)


def bench(
    *, num_blocks: int = 100, max_batch_size: int = 4, max_step_tokens: int = 32, chunk_multiple: int = 1
) -> Bench:
    allocator = BlockPool(num_blocks + 1)
    scheduler = Scheduler(
        allocator,
        block_size=BLOCK_SIZE,
        max_batch_size=max_batch_size,
        max_step_tokens=max_step_tokens,
        chunk_multiple=chunk_multiple,
    )
    return Bench(scheduler, allocator, [])


def test_a_long_prompt_is_cut_into_chunks_beside_running_decodes() -> None:
    b = bench()
    b.add("short", 5)
    assert b.step() == ([], [("short", 5)])
    b.add("long", 70)
    assert [b.step() for _ in range(4)] == [
        (["short"], [("long", 31)]),
        (["short"], [("long", 31)]),
        (["short"], [("long", 8)]),
        (["short", "long"], []),
    ]


def test_prompts_share_a_step_in_order_of_arrival_until_the_budget_is_spent() -> None:
    b = bench()
    for name, length in (("a", 10), ("b", 10), ("c", 30), ("d", 3)):
        b.add(name, length)
    assert b.step() == ([], [("a", 10), ("b", 10), ("c", 12)])
    assert b.step() == (["a", "b"], [("c", 18), ("d", 3)])


def test_a_prompt_is_cut_after_multiples_where_one_is_in_reach() -> None:
    b = bench(max_step_tokens=50, chunk_multiple=20)
    for name, length in (("a", 7), ("b", 90), ("c", 45)):
        b.add(name, length)
    assert b.step() == ([], [("a", 7), ("b", 40)])
    assert b.step() == (["a"], [("b", 40)])  # nine tokens are left, and no multiple of 20 after them
    assert b.step() == (["a"], [("b", 10), ("c", 20)])
    assert b.step() == (["a", "b"], [("c", 25)])


def test_a_prompt_goes_on_where_no_multiple_is_in_reach_of_any_step() -> None:
    b = bench(max_step_tokens=8, chunk_multiple=20)
    b.add("a", 25)
    assert [b.step()[1] for _ in range(4)] == [[("a", 8)], [("a", 8)], [("a", 8)], [("a", 1)]]


def test_no_more_than_a_full_batch_runs() -> None:
    b = bench(max_batch_size=2)
    for name in "abc":
        b.add(name, 4, max_tokens=2)
    assert b.step() == ([], [("a", 4), ("b", 4)])
    assert b.step() == (["a", "b"], [])
    assert b.step() == ([], [("c", 4)])


def test_whoever_does_not_fit_keeps_those_behind_it_waiting() -> None:
    b = bench(num_blocks=4)
    b.add("running", 33, max_tokens=3)
    b.step()
    b.add("large", 20)
    b.add("small", 2)
    assert b.step()[1] == [("running", 1)]
    assert b.step() == (["running"], [])
    assert b.step() == (["running"], [])
    assert b.step() == ([], [("large", 20), ("small", 2)])


def test_the_youngest_is_preempted_and_recomputes_its_tokens() -> None:
    b = bench(num_blocks=2)
    b.add("old", 15, max_tokens=15)
    b.add("young", 14, max_tokens=15)
    assert b.step() == ([], [("old", 15), ("young", 14)])
    assert b.step() == (["old", "young"], [])
    assert b.step() == (["old"], [])  # needs a second block: young gives its own
    assert b.scheduler.num_preemptions == 1
    for _ in range(12):
        b.step()
    assert b.done == ["old"]
    assert b.step() == ([], [("young", 16)])  # 14 of the prompt and the two tokens it had
    assert b.step() == (["young"], [])


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=12),
    num_blocks=st.integers(7, 14),
    max_step_tokens=st.integers(4, 40),
)
def test_all_requests_finish_where_one_fits(
    sizes: list[tuple[int, int]], num_blocks: int, max_step_tokens: int
) -> None:
    b = bench(num_blocks=num_blocks, max_step_tokens=max_step_tokens)
    for idx, (prompt_len, max_tokens) in enumerate(sizes):
        b.add(str(idx), prompt_len, max_tokens)
    for _ in range(6_000):
        if not b.scheduler.has_work:
            break
        decodes, prefills = b.step()
        assert 0 < len(decodes) + sum(count for _, count in prefills) <= max_step_tokens
    assert sorted(b.done) == sorted(str(idx) for idx in range(len(sizes)))
    assert b.allocator.num_free == num_blocks


def test_a_budget_below_the_batch_is_a_programmers_error() -> None:
    with pytest.raises(AssertionError):
        bench(max_batch_size=8, max_step_tokens=4)
