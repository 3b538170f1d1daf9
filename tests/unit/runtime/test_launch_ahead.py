"""Steps that are scheduled and launched before the last one is read: requests come, are prefilled in chunks,
end by length and by end-of-sequence tokens, are cancelled and lose their blocks, on a device that runs what
was launched at once, or only when the host waits for it (`late_device.py`). Tokens are those of an engine
that waits for every step.
"""

import random
import time
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
import torch

from compress.models.random_source import RandomSource
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.kv_cache import kv_bytes_per_token
from compress.runtime.request import Finished, Request, SamplingParams
from tests.support.late_device import LateStream, make_late
from tests.unit.runtime.test_speculative_engine import VOCAB, make_source

CPU = torch.device("cpu")
CONFIG = EngineConfig(max_batch_size=4, max_model_len=96)


class Ahead(Engine):
    """Launches ahead on the CPU."""

    @property
    def _overlaps(self) -> bool:
        return self.observer is None and not self.config.sync


def stopping() -> RandomSource:
    source = make_source()
    arch = source.arch.replace(config={**source.arch.config, "eos_token_id": [7, 19, 30, 44]})
    return RandomSource(arch, device=CPU, dtype=torch.float32)


def make_requests(seed: int, num_requests: int = 14) -> list[Request]:
    rng = random.Random(seed)
    requests = list[Request]()
    for idx in range(num_requests):
        length = rng.choice([1, 2, 9, 15, 16, 17, 33, 60])
        prompt = tuple(rng.randrange(VOCAB if idx % 3 else 4) for _ in range(length))
        params = SamplingParams(
            rng.choice([1, 2, 3, 5, 8, 18, 33]), temperature=rng.choice([0.0, 0.8]), seed=idx,
            top_k=rng.choice([0, 7]), ignore_eos=rng.random() < 0.4, logprobs=rng.random() < 0.3,
        )  # fmt: skip
        requests.append(Request(str(idx), prompt, params, priority=rng.choice([0, 0, 1])))
    return requests


def served(engine: Engine, requests: list[Request], seed: int, *, cancels: bool = False) -> dict[str, Any]:
    """What came of requests that arrive between steps; a few are cancelled."""
    rng = random.Random(seed)
    waiting = deque(requests)
    finished = list[Finished]()
    while waiting or engine.has_work:
        while waiting and (not engine.has_work or rng.random() < 0.3):
            engine.add(waiting.popleft())
        done = engine.step()
        assert len({each.id for each in done}) == len(done)
        finished += done
        if cancels and engine._unfinished and rng.random() < 0.1:
            finished.append(engine.cancel(rng.choice(sorted(engine._unfinished))))
    assert sorted(each.id for each in finished) == sorted(each.id for each in requests)
    assert all(len(each.token_times_s) == len(each.tokens) for each in finished)
    assert engine.counts.reserved_positions == 0
    return {each.id: (each.tokens, each.reason, each.logprobs) for each in finished}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_step_tokens": 21},
        {"prefix_cache": True},
        {"kv_blocks": 8, "swap_blocks": 40},
        {"itl_target_ms": 0.01, "order": "shortest"},
        {"policy": "dynamic", "batch_delay_ms": 0.0},
    ],
    ids=["plain", "chunks", "prefix cache", "swap", "small budget", "dynamic"],
)
@pytest.mark.parametrize("late", [True, False], ids=["late", "at once"])
@pytest.mark.one_in(4)
def test_steps_that_begin_before_the_last_is_read_change_no_token(
    options: dict[str, Any], late: bool
) -> None:
    source = stopping()
    size = 16 * kv_bytes_per_token(source.arch, "F32")
    options = dict(options)
    sizes = {
        name: options.pop(key) * size
        for name, key in (("kv_cache_bytes", "kv_blocks"), ("swap_bytes", "swap_blocks"))
        if key in options
    }
    config = replace(CONFIG, **options, **sizes)
    reasons = set[str]()
    preemptions = 0
    for seed in range(2):
        requests = make_requests(seed)
        plain = served(Engine(source, device=CPU, config=CONFIG), requests, seed)
        engine = Ahead(source, device=CPU, config=config)
        stream = make_late(engine) if late else None
        assert_alike(served(engine, requests, seed), plain)
        preemptions += engine.num_preemptions
        assert engine.num_preemptions == engine.counts.swapped_in
        assert stream is None or num_ahead(stream) > 10
        reasons |= {reason for _, reason, _ in plain.values()}
    assert reasons == {"stop", "length"}
    assert bool(preemptions) == bool(sizes)


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same tokens; log probabilities within the rounding of a prefill in other chunks."""
    assert found.keys() == expected.keys()
    for name, (tokens, reason, logprobs) in found.items():
        assert (tokens, reason) == expected[name][:2]
        assert logprobs == (None if logprobs is None else pytest.approx(expected[name][2], abs=1e-5))


def num_ahead(stream: LateStream) -> int:
    """Return how many launches came while the tokens of an earlier one were waited for later."""
    waited = {number: place for place, (what, number) in enumerate(stream.log) if what == "wait"}
    places = {number: place for place, (what, number) in enumerate(stream.log) if what == "launch"}
    return sum(waited.get(number - 1, 0) > place for number, place in places.items())


def test_who_is_cancelled_ahead_of_a_step_leaves_the_others_their_tokens() -> None:
    source = stopping()
    for seed in range(3):
        requests = make_requests(seed)
        plain = served(Engine(source, device=CPU, config=CONFIG), requests, seed)
        engine = Ahead(source, device=CPU, config=replace(CONFIG, prefix_cache=True))
        make_late(engine)
        found = served(engine, requests, seed, cancels=True)
        assert any(reason == "cancelled" for _, reason, _ in found.values())
        for name, (tokens, reason, _) in found.items():
            if reason == "cancelled":
                assert tokens == plain[name][0][: len(tokens)]
            else:
                assert (tokens, reason) == plain[name][:2]


@pytest.mark.parametrize("ends", ["cancelled", "stop"])
def test_a_request_that_ended_is_not_decoded_in_the_place_of_one_that_is_prefilled(ends: str) -> None:
    source = make_source()
    config = replace(CONFIG, max_step_tokens=16)
    sure = SamplingParams(50, ignore_eos=True)
    first = Request("first", (1, 2, 3), replace(sure, ignore_eos=ends == "cancelled"))
    (alone,) = Engine(source, device=CPU, config=config).generate([replace(first, params=sure)])
    eos = next(alone.tokens[idx] for idx in (6, 5, 7) if alone.tokens[idx] not in alone.tokens[:idx])
    arch = source.arch.replace(config={**source.arch.config, "eos_token_id": [eos]})
    engine = Ahead(RandomSource(arch, device=CPU, dtype=torch.float32), device=CPU, config=config)
    engine.add(first)
    engine.add(Request("second", (4, 5, 6), sure))
    for _ in range(3):
        engine.step()
    engine.add(Request("prefilled", tuple(range(60)), replace(sure, max_tokens=2)))
    for _ in range(2):
        engine.step()
    if ends == "cancelled":
        engine.cancel("first")
    order = list[str]()
    while engine.has_work:
        order += [each.id for each in engine.step()]
    assert [each for each in order if each != "first"] == ["prefilled", "second"]
    assert engine.counts.reserved_positions == 0


def test_a_deadline_ends_a_request_whose_step_is_under_way() -> None:
    engine = Ahead(make_source(), device=CPU, config=CONFIG)
    make_late(engine)
    params = SamplingParams(90, ignore_eos=True)
    engine.add(Request("stays", (1, 2), replace(params, max_tokens=20)))
    engine.add(Request("ends", (3,), params, deadline_s=time.perf_counter() + 0.02))
    finished = list[Finished]()
    while engine.has_work:
        finished += engine.step()
    assert {each.id: each.reason for each in finished} == {"stays": "length", "ends": "deadline"}
    assert engine.counts.reserved_positions == 0


def steps_of(stream: LateStream) -> list[tuple[str, int]]:
    log, stream.log = stream.log, []
    return log


def test_the_host_reads_a_step_only_after_the_next_one_was_launched() -> None:
    """The order of launches and waits, as one request joins another and both end by length."""
    engine = Ahead(make_source(), device=CPU, config=CONFIG)
    stream = make_late(engine)
    engine.add(Request("first", (1, 2, 3), SamplingParams(5, ignore_eos=True)))
    engine.step()  # the prompt, and a decode step on top of it before its first token is read
    assert steps_of(stream) == [("launch", 1), ("launch", 2), ("wait", 1)]
    engine.add(Request("second", (4, 5), SamplingParams(3, ignore_eos=True)))
    engine.step()  # the next step decodes one and prefills the other
    assert steps_of(stream) == [("launch", 3), ("launch", 4), ("wait", 2)]
    engine.step()  # both decode, one by a token that only the device knows
    assert steps_of(stream) == [("launch", 5), ("wait", 3), ("wait", 4)]
    engine.step()  # the last token of both
    assert steps_of(stream) == [("launch", 6), ("wait", 5)]
    assert engine.counts.num_running == 2
    finished = engine.step()  # nothing is left to launch: no surplus step for ends that are known
    assert steps_of(stream) == [("wait", 6)]
    assert sorted(each.id for each in finished) == ["first", "second"]
    assert not engine.has_work


def test_a_row_is_taken_in_the_step_after_its_last_token_was_launched() -> None:
    """With one row, the next prompt follows the last decode step at once."""
    engine = Ahead(make_source(), device=CPU, config=replace(CONFIG, max_batch_size=1))
    stream = make_late(engine)
    for name in ("first", "second"):
        engine.add(Request(name, (1, 2), SamplingParams(2, ignore_eos=True)))
    assert engine.step() == []
    assert steps_of(stream) == [("launch", 1), ("launch", 2), ("wait", 1)]
    assert [each.id for each in engine.step()] == ["first"]
    assert steps_of(stream) == [("launch", 3), ("wait", 2)]  # the second one's prompt
    assert engine.counts.num_running == 1


def test_strict_steps_end_with_their_own_tokens() -> None:
    engine = Ahead(make_source(), device=CPU, config=replace(CONFIG, sync=True))
    stream = make_late(engine)
    engine.add(Request("first", (1, 2, 3), SamplingParams(3, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    log = steps_of(stream)
    assert log == [(what, number) for number in (1, 2, 3) for what in ("launch", "wait")]
