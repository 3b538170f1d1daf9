"""Completions of one prompt: it is computed once, all of its blocks are shared, and the last one, partly
filled, is copied for who writes to it first. Tokens and log probabilities are those of separate requests.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from compress.runtime.block_pool import BlockPool
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.generation import Generation
from compress.runtime.kv_cache import kv_bytes_per_token
from compress.runtime.request import Finished, Request, SamplingParams
from compress.runtime.scheduled import Batch
from compress.runtime.scheduler import Scheduler
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.speculation import Speculative
from tests.support.late_device import make_late
from tests.unit.runtime.test_launch_ahead import Ahead
from tests.unit.runtime.test_speculative_engine import make_source

CPU = torch.device("cpu")
CONFIG = EngineConfig(max_batch_size=4, max_model_len=96)


def completions(
    length: int, *, max_tokens: int = 14, count: int = 4, group: str | None = "g"
) -> list[Request]:
    """The first is greedy, the others are drawn."""
    prompt = tuple(range(3, 3 + length))
    return [
        Request(
            f"{length}-{idx}",
            prompt,
            SamplingParams(max_tokens, temperature=0.9 * (idx > 0), seed=idx, logprobs=True, ignore_eos=True),
            group=group,
        )
        for idx in range(count)
    ]


def facts(finished: list[Finished]) -> list[tuple[Any, ...]]:
    return [(each.tokens, each.logprobs, each.reason) for each in finished]


def separate(requests: list[Request]) -> list[tuple[Any, ...]]:
    engine = Engine(make_source(), device=CPU, config=CONFIG)
    found = facts([engine.generate([replace(each, group=None)])[0] for each in requests])
    assert engine.counts.shared_prompts == engine.counts.copied_blocks == 0
    return found


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["cold", "prefix cache"])
@pytest.mark.parametrize(("length", "num_copies"), [(37, 3), (32, 0), (1, 3)])
def test_completions_of_a_prompt_are_those_of_separate_requests(
    length: int, num_copies: int, prefix_cache: bool, ahead: bool
) -> None:
    requests = completions(length)
    config = replace(CONFIG, prefix_cache=prefix_cache)
    engine = (Ahead if ahead else Engine)(make_source(), device=CPU, config=config)
    if ahead:
        make_late(engine)
    assert facts(engine.generate(requests)) == separate(requests)
    counts = engine.counts
    assert (counts.shared_prompts, counts.copied_blocks) == (3, num_copies)
    assert counts.reserved_positions == counts.live_tokens == 0


def test_a_prompt_takes_its_blocks_once_until_somebody_writes() -> None:
    engine = Engine(make_source(), device=CPU, config=CONFIG)
    for each in completions(37):
        engine.add(each)
    engine.step()
    assert (engine.counts.reserved_positions, engine.counts.live_tokens) == (48, 37)
    engine.step()
    assert (engine.counts.reserved_positions, engine.counts.live_tokens) == (96, 32 + 4 * 6)
    assert engine.counts.copied_blocks == 3


def test_completions_of_one_token_copy_nothing() -> None:
    requests = completions(37, max_tokens=1)
    engine = Engine(make_source(), device=CPU, config=CONFIG)
    assert facts(engine.generate(requests)) == separate(requests)
    assert (engine.counts.shared_prompts, engine.counts.copied_blocks) == (3, 0)


def test_only_a_group_with_one_prompt_shares() -> None:
    engine = Engine(make_source(), device=CPU, config=CONFIG)
    first, second, *_ = completions(20)
    third = replace(second, prompt=(5, *second.prompt[1:]), id="x")
    fourth = replace(second, group="another", id="y")
    requests = [first, third, fourth, replace(second, group=None)]
    assert facts(engine.generate(requests)) == separate(requests)
    assert engine.counts.shared_prompts == 0


@pytest.mark.parametrize("ended", [0, 1, 3])
def test_whoever_is_cancelled_on_the_way_the_others_go_on(ended: int) -> None:
    """The prompt takes five chunks; who computes it may leave after the second."""
    config = replace(CONFIG, max_step_tokens=8)
    requests = completions(37)
    whole = Engine(make_source(), device=CPU, config=config)
    expected = {each.id: each.tokens for each in whole.generate(requests)}
    assert whole.counts.shared_prompts == 3
    engine = Engine(make_source(), device=CPU, config=config)
    for each in requests:
        engine.add(each)
    finished = [*engine.step(), *engine.step()]
    assert engine.counts.live_tokens == 16
    engine.cancel(requests[ended].id)
    while engine.has_work:
        finished += engine.step()
    assert {each.id: each.tokens for each in finished} == {
        each.id: expected[each.id] for each in requests if each is not requests[ended]
    }
    assert engine.counts.reserved_positions == 0


def test_completions_that_lose_their_blocks_have_the_same_tokens() -> None:
    source = make_source()
    size = 16 * kv_bytes_per_token(source.arch, "F32")
    requests = completions(29, max_tokens=40)
    config = replace(CONFIG, kv_cache_bytes=9 * size, swap_bytes=40 * size)
    for kind in (Engine, Ahead):
        engine = kind(source, device=CPU, config=config)
        assert [each.tokens for each in engine.generate(requests)] == [
            each for each, _, _ in separate(requests)
        ]
        assert engine.counts.preemptions > 0
        assert engine.counts.shared_prompts > 0


@pytest.mark.parametrize("name", ["ngram", "draft_model"])
def test_speculative_completions_share_where_the_proposer_keeps_no_cache(name: str) -> None:
    source = make_source()
    proposer = NGram() if name == "ngram" else DraftModel(source)
    config = replace(CONFIG, speculative=Speculative(proposer, k=3))
    requests = completions(37)
    engine = Engine(source, device=CPU, config=config)
    assert facts(engine.generate(requests)) == separate(requests)
    assert (engine.counts.shared_prompts > 0) == (name == "ngram")


class Stored:
    """A swap that notes who was stored."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def store(self, generation: Generation) -> bool:
        self.names.append(generation.request.id)
        return False

    def holds(self, generation: Generation) -> bool:
        return False

    def restore(self, generation: Generation) -> int:
        raise AssertionError

    def drop(self, generation: Generation) -> None:
        pass


def test_a_block_that_is_yet_to_be_copied_to_is_not_stored() -> None:
    """Two of three completions take a copy, then two urgent requests take the blocks of the last two."""
    stored = Stored()
    scheduler = Scheduler(BlockPool(1 + 9), block_size=4, max_batch_size=5, max_step_tokens=14, swap=stored)

    def add(name: str, length: int, priority: int, group: str | None = None) -> Generation:
        request = Request(name, (1,) * length, SamplingParams(9), priority=priority, group=group)
        generation = Generation(request, 0.0, list(request.prompt))
        scheduler.add(generation)
        return generation

    def run(batch: Batch) -> None:
        for chunk in batch.prefills:
            for each in chunk.generations:
                each.num_computed += chunk.num_tokens
                if each.decoding:
                    each.append([7], 0.0, frozenset())

    several = [add(f"completion {idx}", 18, 1, "g") for idx in range(3)]
    run(scheduler.schedule())
    urgent = [add(f"urgent {idx}", 4, 0) for idx in range(2)]
    run(scheduler.schedule())
    (last,) = {each.blocks[-1] for each in several}
    batch = scheduler.schedule()
    assert batch.decodes == (several[0], *urgent)
    assert batch.copies == ((last, several[0].blocks[-1]),)
    assert stored.names == ["completion 2"]
    assert scheduler.num_copied == 1
