"""The engine as a target, on a scripted clock; and the real engine gives every request its tokens."""

import dataclasses

import pytest
import torch

from compress.errors import QueueFull
from compress.models.random_source import RandomSource
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import EngineCounts, Finished, Request
from compress.validate.load.arrivals import Traffic
from compress.validate.load.engine_target import EngineTarget
from compress.validate.load.lengths import LengthLaw
from compress.validate.load.workload import LoadRequest, RandomWorkload, Workload
from tests.support.tiny_decoder import LLAMA, tiny_arch


@dataclasses.dataclass
class ScriptedClock:
    """A clock that moves only when somebody sleeps or steps."""

    now_s: float = 50.0
    slept_s: list[float] = dataclasses.field(default_factory=list)

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += max(seconds, 1e-9)


@dataclasses.dataclass
class ScriptedEngine:
    """An engine in which a step takes 100 ms and gives each of at most `width` requests one token."""

    clock: ScriptedClock
    width: int = 2
    most_waiting: int = 1000
    requests: dict[str, Request] = dataclasses.field(default_factory=dict)
    times_s: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    num_flushes: int = 0
    added_s: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def counts(self) -> EngineCounts:
        running = list(self.requests)[: self.width]
        live = sum(len(self.requests[each].prompt) + len(self.times_s[each]) for each in running)
        waiting = len(self.requests) - len(running)
        return EngineCounts(len(running), waiting, 100, 16 * len(running), live, 0, 0, 0, 0, 0, 0)

    def add(self, request: Request) -> None:
        if len(self.requests) >= self.most_waiting:
            raise QueueFull("the queue is full.")
        assert request.params.ignore_eos
        self.requests[request.id] = request
        self.times_s[request.id] = []
        self.added_s[request.id] = self.clock.now_s

    def flush(self) -> None:
        self.num_flushes += 1

    def step(self) -> list[Finished]:
        self.clock.now_s += 0.1
        finished = []
        for name, request in list(self.requests.items())[: self.width]:
            self.times_s[name].append(self.clock.now_s)
            if len(self.times_s[name]) == request.params.max_tokens:
                del self.requests[name]
                times_s = tuple(self.times_s[name])
                tokens = tuple(range(len(times_s)))
                finished.append(
                    Finished(
                        name, request.prompt, tokens, "length", self.added_s[name], times_s, cached_tokens=3
                    )
                )
        return finished


def load(arrivals_s: tuple[float, ...] | None, num: int, tokens: int, limit: int | None = None) -> Workload:
    requests = tuple(LoadRequest(tuple(range(10, 15)), tokens) for _ in range(num))
    traffic = Traffic(max_concurrency=limit)
    return Workload("scripted", requests, arrivals_s, traffic, traffic.mode)


@pytest.fixture
def clock() -> ScriptedClock:
    return ScriptedClock()


@pytest.fixture
def engine(clock: ScriptedClock) -> ScriptedEngine:
    return ScriptedEngine(clock)


@pytest.fixture
def target(engine: ScriptedEngine, clock: ScriptedClock) -> EngineTarget:
    return EngineTarget(engine, "scripted", clock=clock)


def test_requests_that_arrive_at_once_wait_for_their_turn(target: EngineTarget) -> None:
    run = target.run(load(None, 4, 2))
    assert run.duration_s == pytest.approx(0.4)
    firsts = [each.token_times_s[0] - each.arrival_s for each in run.served]
    assert firsts == pytest.approx([0.1, 0.1, 0.3, 0.3])
    assert [each.request_idx for each in run.served] == [0, 1, 2, 3]
    assert all(each.cached_tokens == 3 for each in run.served)
    assert run.use is not None
    assert (run.use.peak_running, run.use.peak_waiting) == (2, 2)
    assert run.peak_concurrency == 4


def test_times_count_from_the_arrival_also_where_a_step_was_running(
    target: EngineTarget, clock: ScriptedClock
) -> None:
    run = target.run(load((0.0, 0.04, 1.0), 3, 2))
    assert [each.arrival_s - run.started_s for each in run.served] == pytest.approx([0.0, 0.04, 1.0])
    assert [each.sent_s - run.started_s for each in run.served] == pytest.approx([0.0, 0.1, 1.0])
    firsts = [each.token_times_s[0] - each.arrival_s for each in run.served]
    assert firsts == pytest.approx([0.1, 0.16, 0.1])
    assert sum(clock.slept_s) == pytest.approx(1.0 - 0.3)  # idle from the end of the second to the third


def test_a_closed_loop_sends_when_a_client_is_free(target: EngineTarget) -> None:
    run = target.run(load(None, 4, 2, limit=1))
    assert run.peak_concurrency == 1
    assert [each.arrival_s - run.started_s for each in run.served] == pytest.approx([0.0, 0.2, 0.4, 0.6])
    assert all(each.arrival_s == pytest.approx(each.sent_s) for each in run.served)


def test_an_open_loop_with_a_limit_counts_the_wait_at_the_client(target: EngineTarget) -> None:
    run = target.run(load((0.0, 0.0), 2, 2, limit=1))
    assert [each.token_times_s[0] - each.arrival_s for each in run.served] == pytest.approx([0.1, 0.3])
    assert run.served[1].sent_s - run.served[1].arrival_s == pytest.approx(0.2)


def test_a_full_queue_is_a_failed_request(target: EngineTarget, engine: ScriptedEngine) -> None:
    engine.most_waiting = 3
    run = target.run(load(None, 5, 1))
    assert [bool(each.error) for each in run.served] == [False, False, False, True, True]
    assert len(run.completed) == 3


def test_runs_follow_one_another_on_one_engine(target: EngineTarget) -> None:
    first, second = target.run(load(None, 2, 2)), target.run(load(None, 2, 2))
    assert second.started_s >= first.started_s + first.duration_s
    assert [each.gaps_s for each in first.served] == [pytest.approx(each.gaps_s) for each in second.served]


@pytest.mark.parametrize("policy", ["continuous", "static", "dynamic"])
def test_the_real_engine_gives_every_request_its_tokens(policy: str) -> None:
    arch = tiny_arch(LLAMA)
    cpu = torch.device("cpu")
    source = RandomSource(arch, device=cpu, dtype=torch.float32)
    config = EngineConfig(
        max_batch_size=3,
        max_model_len=64,
        max_step_tokens=16,
        policy=policy,
        batch_delay_ms=1.0,  # type: ignore[arg-type]
    )
    target = EngineTarget(Engine(source, device=cpu, config=config), "tiny")
    drawn = RandomWorkload(
        7, LengthLaw(12, 0.6, 2, 30), LengthLaw(5, 0.6, 1, 20), arch.vocab_size, Traffic(2000.0), seed=4
    )
    workload = drawn.draw()
    run = target.run(workload)
    assert [each.error for each in run.served] == [""] * 7
    asked = [(len(each.prompt), each.output_tokens) for each in workload.requests]
    assert [(each.prompt_tokens, len(each.token_times_s)) for each in run.served] == asked
    assert all(each.arrival_s <= each.sent_s <= each.token_times_s[0] <= each.ended_s for each in run.served)
    assert run.use is not None
    assert run.use.kv_utilization is not None
    assert 0 < run.use.kv_utilization <= 1
    assert run.use.peak_running <= 3
