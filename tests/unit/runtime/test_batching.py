"""When requests may join a batch."""

import pytest

from compress.errors import UsageError
from compress.runtime.batching import Batching
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.generation import Generation
from compress.runtime.request import Request, SamplingParams
from compress.runtime.waiting_queue import WaitingQueue
from tests.unit.runtime.test_engine import CPU, make_requests, make_source, tokens


def queue_of(*arrivals_s: float) -> WaitingQueue:
    queue = WaitingQueue()
    for idx, arrival_s in enumerate(arrivals_s):
        queue.add(Generation(Request(str(idx), (1,), SamplingParams(4)), arrival_s, [1]))
    return queue


def test_continuous_batching_takes_anybody_at_any_time() -> None:
    assert Batching(4).is_open(queue_of(0.0), 3, 0.0)


def test_a_static_batch_waits_until_it_is_full_and_alone() -> None:
    batching = Batching(2, policy="static")
    assert not batching.is_open(queue_of(0.0), 0, 1e6)
    assert not batching.is_open(queue_of(0.0, 0.0), 1, 1e6)
    assert batching.is_open(queue_of(0.0, 0.0, 0.0), 0, 0.0)
    batching.admitted()
    assert batching.is_open(queue_of(0.0, 0.0), 1, 0.0)  # the second of the group
    batching.admitted()
    assert not batching.is_open(queue_of(0.0), 2, 0.0)


def test_a_flush_begins_a_batch_that_is_not_full() -> None:
    batching = Batching(8, policy="static")
    batching.flush = True
    assert batching.is_open(queue_of(0.0), 0, 0.0)


def test_a_dynamic_batch_begins_when_its_first_request_has_waited_long_enough() -> None:
    batching = Batching(8, policy="dynamic", delay_s=0.5)
    assert not batching.is_open(queue_of(10.0, 10.4), 0, 10.49)
    assert batching.is_open(queue_of(10.0, 10.4), 0, 10.5)
    batching.left(1)  # one of the two was cancelled
    batching.admitted()
    assert not batching.is_open(queue_of(10.5), 1, 99.0)


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_an_engine_gives_the_same_tokens_under_every_policy(policy: str) -> None:
    requests = make_requests(8)
    expected = tokens(Engine(make_source(), device=CPU).generate(requests))
    engine = Engine(
        make_source(),
        device=CPU,
        config=EngineConfig(policy=policy, max_batch_size=3),  # type: ignore[arg-type]
    )
    finished = engine.generate(requests)
    assert tokens(finished) == expected
    begun = sorted({each.admitted_s for each in finished if each.admitted_s is not None})
    last = {each.admitted_s: 0.0 for each in finished}
    for each in finished:
        last[each.admitted_s] = max(last[each.admitted_s], each.token_times_s[-1])
    groups = [[each.id for each in finished if each.admitted_s == moment] for moment in begun]
    assert groups == [["0", "1", "2"], ["3", "4", "5"], ["6", "7"]]
    for moment, after in zip(begun, begun[1:], strict=False):
        assert last[moment] <= after  # a group begins when the one before it has ended


def test_a_static_engine_waits_for_more_requests_and_says_it_has_work() -> None:
    engine = Engine(make_source(), device=CPU, config=EngineConfig(policy="static", max_batch_size=3))
    requests = make_requests(3)
    for request in requests[:2]:
        engine.add(request)
    assert [engine.step() for _ in range(3)] == [[], [], []]
    assert engine.has_work
    assert engine.counts.num_waiting == 2
    engine.add(requests[2])
    finished = []
    while engine.has_work:
        finished += engine.step()
    assert len(finished) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "often"}, "policy is often; it must be continuous or static or dynamic"),
        ({"order": "random"}, "order is random; it must be arrival or shortest"),
        ({"max_waiting": 0}, "max_waiting is 0"),
        ({"itl_target_ms": 0.0}, "itl_target_ms is 0.0"),
        ({"itl_target_ms": float("inf")}, "itl_target_ms is inf"),
        ({"batch_delay_ms": float("nan")}, "batch_delay_ms is nan"),
        ({"swap_bytes": -1}, "swap_bytes is -1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EngineConfig(**changes)  # type: ignore[arg-type]
