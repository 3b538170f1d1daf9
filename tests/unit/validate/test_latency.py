"""Latency on an engine whose clock, and the roofline on a model whose arithmetic, are known exactly."""

import dataclasses
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from compress.errors import CompressError, UsageError
from compress.models.experts import Experts
from compress.runtime.request import Finished, Request
from compress.validate.contention import CpuTimes, cpu_clock
from compress.validate.latency import LatencyConditions, LatencyRow, compare_latency, measure_latency
from compress.validate.roofline import Work, advise, roofline
from compress.validate.stability import stability

if TYPE_CHECKING:
    from compress.runtime.engine import Engine


@dataclasses.dataclass
class Clock:
    """The time on the wall, and the engines in the order in which they used it."""

    now_s: float = 0.0
    turns: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class ClockworkEngine:
    """An engine on a clock of its own: 7 ms a prompt, then 1 ms a sequence and token.

    Both are multiplied by `slowdown`, a function of how many batches were run on the clock before.
    """

    slowdown: Callable[[int], float] = lambda turn: 1.0
    unit_s: float = 0.001
    short: bool = False
    name: str = ""
    clock: Clock = dataclasses.field(default_factory=Clock)
    weight_bytes: int = 1_000_000
    kv_bytes_per_token: int = 100
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    arch: Any = dataclasses.field(
        default_factory=lambda: SimpleNamespace(has_experts=False, step_state_bytes=3000)
    )
    seen: list[Request] = dataclasses.field(default_factory=list)
    waiting: list[tuple[Request, float]] = dataclasses.field(default_factory=list)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def expected_weight_bytes(self, num_rows: int) -> int:
        return self.weight_bytes * (num_rows if self.arch.has_experts else 1)

    def add(self, request: Request) -> None:
        self.seen.append(request)
        self.waiting.append((request, self.clock.now_s))

    def step(self) -> list[Finished]:
        step_s = self.unit_s * len(self.waiting) * self.slowdown(len(self.clock.turns))
        num = self.waiting[0][0].params.max_tokens - self.short
        times_s = tuple(self.clock.now_s + (7 + index) * step_s for index in range(num))
        self.clock.now_s = times_s[-1] + 0.5
        self.clock.turns.append(self.name)
        done = [
            Finished(
                id=r.id,
                prompt=r.prompt,
                tokens=(0,) * num,
                reason="length",
                arrival_s=a,
                token_times_s=times_s,
            )
            for r, a in self.waiting
        ]
        self.waiting = []
        return done


def conditions(
    *,
    repeats: int = 3,
    warmups: int = 1,
    output_tokens: int = 10,
    seed: int = 0,
    min_repeats: int | None = None,
) -> LatencyConditions:
    return LatencyConditions(
        prompt_tokens=20,
        output_tokens=output_tokens,
        repeats=repeats,
        warmups=warmups,
        vocab_size=50,
        bandwidth_bytes_per_s=2e9,
        seed=seed,
        min_repeats=min_repeats,
    )


def measure(
    engine: ClockworkEngine, *, seed: int = 0, repeats: int = 3, warmups: int = 1, output_tokens: int = 10
) -> list[LatencyRow]:
    wanted = conditions(repeats=repeats, warmups=warmups, output_tokens=output_tokens, seed=seed)
    return measure_latency(cast("Engine", engine), wanted, batch_sizes=[1, 4])


def compare(
    slowdown: Callable[[int], float],
    *,
    lost_frac: float = 0.0,
    repeats: int = 5,
    min_repeats: int | None = None,
    units_s: tuple[float, float] = (0.002, 0.001),
) -> tuple[LatencyRow, LatencyRow]:
    """Measure two engines on one wall clock that others slow down: `slowdown` by how many batches came
    before, after two warm-ups.
    """
    clock = Clock()
    engines = {
        name: cast("Engine", ClockworkEngine(lambda turn: slowdown(turn - 2), unit_s, name=name, clock=clock))
        for name, unit_s in zip(("source", "candidate"), units_s, strict=True)
    }
    ticks = busy_processor(lost_frac)
    rows = compare_latency(
        engines,
        conditions(repeats=repeats, min_repeats=min_repeats),
        batch_size=1,
        clock=lambda: next(ticks),
    )
    return rows["source"], rows["candidate"]


def busy_processor(lost_frac: float) -> Iterator[CpuTimes]:
    """A process that waits for `lost_frac` of the time it needs, read once a second."""
    second = CpuTimes(run=round((1 - lost_frac) * 1e9), wait=round(lost_frac * 1e9), busy=100)
    now = CpuTimes()
    while True:
        yield now
        now += second


def test_times_are_those_of_the_engines_clock() -> None:
    one, four = measure(ClockworkEngine())
    assert (one.batch_size, four.batch_size) == (1, 4)
    for row, num in ((one, 1), (four, 4)):
        assert (row.ttft_ms_p50.value, row.ttft_ms_p95.value) == pytest.approx((7 * num, 7 * num))
        assert (row.tpot_ms_p50.value, row.tpot_ms_p99.value, row.itl_ms_p99) == pytest.approx(
            (num, num, num)
        )
        assert row.output_tokens_per_s == pytest.approx(num * 10 / (0.007 * num + 9 * 0.001 * num))


def test_the_floor_is_bytes_of_weights_caches_and_states_over_bandwidth_at_the_mean_context() -> None:
    one, four = measure(ClockworkEngine())
    assert one.step_bytes == 1_000_000 + 100 * 25 + 3000
    assert four.step_bytes == 1_000_000 + 4 * (100 * 25 + 3000)
    assert four.floor_ms == pytest.approx(four.step_bytes / 2e9 * 1e3)
    assert four.floor_frac == pytest.approx(four.floor_ms / 4.0)


def test_warm_ups_are_run_and_not_counted() -> None:
    def slow_at_first(turn: int) -> float:
        return 10.0 if turn < 2 else 1.0

    assert measure(ClockworkEngine(slow_at_first), warmups=2)[0].tpot_ms_p99.value == pytest.approx(1.0)
    counted = measure(ClockworkEngine(slow_at_first), warmups=1)[0]
    assert counted.tpot_ms_p50.value == pytest.approx(1.0)
    assert counted.tpot_ms_p50.upper >= 10.0


def test_a_warm_up_is_short_only_where_nothing_is_compiled() -> None:
    for device, expected in (("cpu", [8, 10, 10, 10]), ("cuda", [10] * 4)):
        engine = ClockworkEngine(device=torch.device(device))
        measure(engine)
        assert [each.params.max_tokens for each in engine.seen[:4]] == expected


def test_no_prompt_is_seen_twice_and_a_seed_repeats_them() -> None:
    first = ClockworkEngine()
    second = ClockworkEngine()
    other = ClockworkEngine()
    measure(first)
    measure(second)
    measure(other, seed=1)
    prompts = [request.prompt for request in first.seen]
    assert len(set(prompts)) == len(prompts) == 4 * 1 + 4 * 4
    assert {len(prompt) for prompt in prompts} == {20}
    assert (
        prompts == [request.prompt for request in second.seen] != [request.prompt for request in other.seen]
    )
    assert all(request.params.ignore_eos and request.params.temperature == 0.0 for request in first.seen)


def test_an_engine_that_gives_fewer_tokens_is_not_measured() -> None:
    with pytest.raises(CompressError, match="nothing was measured"):
        measure(ClockworkEngine(short=True))


def test_conditions_without_an_uncertainty_or_a_gap_are_refused() -> None:
    with pytest.raises(UsageError, match="repeats >= 2"):
        measure(ClockworkEngine(), repeats=1)
    with pytest.raises(UsageError, match="output_tokens >= 2"):
        measure(ClockworkEngine(), output_tokens=1)


def test_a_row_of_json_is_flat_and_metrics_leave_the_conditions_out() -> None:
    row = measure(ClockworkEngine())[0]
    flat = row.as_json()
    assert flat["tpot_ms_p50_lower"] <= flat["tpot_ms_p50"] <= flat["tpot_ms_p50_upper"]
    assert all(value is None or isinstance(value, int | float | str) for value in flat.values())
    assert "batch_size" not in row.metrics()
    assert row.metrics()["tpot_ms_p95"] == row.tpot_ms_p95


def test_models_take_turns_and_the_order_is_reversed_after_each() -> None:
    clock = Clock()
    engines = {name: cast("Engine", ClockworkEngine(name=name, clock=clock)) for name in ("a", "b", "c")}
    rows = compare_latency(engines, conditions(), batch_size=1)
    assert "".join(clock.turns) == "abc" + "abc" + "cba" + "abc"
    assert all(row.interleaved for row in rows.values())
    assert not measure(ClockworkEngine())[0].interleaved


def test_models_are_timed_on_the_same_prompts() -> None:
    one = ClockworkEngine(name="one")
    other = ClockworkEngine(name="other")
    engines = {each.name: cast("Engine", each) for each in (one, other)}
    compare_latency(engines, conditions(), batch_size=2)
    assert [request.prompt for request in one.seen] == [request.prompt for request in other.seen]


def test_steady_repeats_are_stable_and_end_the_measurement() -> None:
    for row in compare(lambda turn: 1.0 + 0.01 * (turn % 3), min_repeats=3):
        assert row.repeats == 3
        assert not row.unstable
        assert row.tpot_instability == row.ttft_instability == ""
        assert row.unproven() == {}
    assert [row.repeats for row in compare(lambda turn: 1.0)] == [5, 5]


def test_slow_repeats_are_seen_and_no_repeat_is_saved() -> None:
    """Another program runs during two of five turns of both models."""
    for row in compare(lambda turn: 4.0 if turn in (4, 5, 6, 7) else 1.0, min_repeats=3):
        assert row.repeats == 5
        assert row.unstable
        assert "repeats spread over 300 % of their median" in row.tpot_instability
        assert row.unproven().keys() == row.metrics().keys()


def test_a_drift_is_seen_and_its_direction() -> None:
    for row in compare(lambda turn: 1.0 + 0.03 * turn):
        assert "slower than the first" in row.tpot_instability
        assert row.tpot_drift_frac > 0.1
    for row in compare(lambda turn: 1.0 - 0.03 * turn):
        assert "faster than the first" in row.tpot_instability


def test_what_slows_both_models_leaves_their_ratio() -> None:
    """The machine becomes slower by 3 % with every batch; measured one after the other, the ratio would be
    off by a sixth.
    """
    source, candidate = compare(lambda turn: 1.0 + 0.03 * turn)
    assert source.tpot_ms_p50.value / candidate.tpot_ms_p50.value == pytest.approx(2.0, rel=0.03)


@pytest.mark.parametrize(
    "slowdown", [lambda turn: 1.0 + turn % 2, lambda turn: 1.0 + 0.1 * turn], ids=["jitter", "drift"]
)
def test_the_law_does_not_depend_on_speed(slowdown: Callable[[int], float]) -> None:
    fast, slow = (compare(slowdown, units_s=(unit, unit)) for unit in (1e-5, 1.0))
    for each, other in zip(fast, slow, strict=True):
        assert each.tpot_spread_frac == pytest.approx(other.tpot_spread_frac, rel=1e-4)
        assert each.tpot_drift_frac == pytest.approx(other.tpot_drift_frac, rel=1e-4, abs=1e-9)
        assert each.tpot_instability == other.tpot_instability != ""


def test_lost_processor_time_is_seen_where_repeats_agree() -> None:
    for row in compare(lambda turn: 1.0, lost_frac=0.4):
        assert row.tpot_spread_frac == pytest.approx(0.0, abs=1e-9)
        assert row.cpu_lost_frac == pytest.approx(0.4)
        assert row.tpot_instability == "other work took 40 % of the processor time"
    assert not any(row.unstable for row in compare(lambda turn: 1.0, lost_frac=0.05))


def test_few_repeats_have_students_interval_and_many_their_own_order() -> None:
    """With five normal values the interval of the median is at least as wide as that of the mean."""
    few, _ = compare(lambda turn: 1.0 + 0.01 * (turn % 4), repeats=3)
    assert few.tpot_ms_p50.upper - few.tpot_ms_p50.lower > 2 * few.tpot_spread_frac * few.tpot_ms_p50.value
    many, _ = compare(lambda turn: 1.0 + 0.01 * (turn % 4), repeats=20)
    assert many.tpot_ms_p50.upper - many.tpot_ms_p50.lower <= 0.04 * many.tpot_ms_p50.value


def test_an_odd_repeat_in_the_middle_belongs_to_neither_half() -> None:
    found = stability([1.0, 1.0, 50.0, 2.0, 2.0])
    assert found.drift_frac == 1.0
    assert not found.agrees


def test_lost_time_is_waiting_and_stealing() -> None:
    assert CpuTimes().lost_frac is None
    assert CpuTimes(run=3, wait=1).lost_frac == pytest.approx(0.25)
    assert CpuTimes(run=4, busy=10, stolen=5).lost_frac == pytest.approx(0.5)
    assert CpuTimes(run=3, wait=1, busy=10, stolen=2).lost_frac == pytest.approx(1 - 0.75 * 0.8)
    assert CpuTimes(1, 2, 3, 4) + CpuTimes(4, 3, 2, 1) - CpuTimes(5, 5, 5, 5) == CpuTimes()


def test_the_counters_of_this_process_only_grow() -> None:
    for on_cpu in (True, False):
        clock = cpu_clock(on_cpu=on_cpu)
        reads = [clock() for _ in range(3) if sum(range(200_000))]
        for before, after in pairwise(reads):
            spent = after - before
            assert min(spent.run, spent.busy, spent.stolen) >= 0
            assert spent.lost_frac is None or 0.0 <= spent.lost_frac < 1.0


def test_roofline_of_known_arithmetic() -> None:
    work = Work(
        weight_bytes=8_000,
        kv_bytes_per_token=10,
        flops_per_token=4_000,
        head_flops=500,
        attention_flops_per_pair=2,
        decode_flops_per_pair=2,
    )
    prefill, decode = roofline(
        work,
        batch_size=2,
        prompt_tokens=100,
        output_tokens=11,
        ttft_ms=1000,
        tpot_ms=100,
        bandwidth_bytes_per_s=1e5,
        flops_per_s=1e6,
    )
    assert prefill.flops == 2 * (100 * 4_000 + 500 + 5_050 * 2)
    assert decode.flops == 2 * (4_000 + 500 + 105.5 * 2)
    assert (prefill.bound, prefill.floor_ms) == ("compute", pytest.approx(prefill.flops / 1e3))
    assert decode.bytes == 8_000 + 2 * 10 * 105.5
    assert (decode.bound, decode.floor_ms) == ("memory", pytest.approx(decode.bytes / 100))
    assert prefill.time_frac == decode.time_frac == pytest.approx(0.5)
    assert decode.floor_frac == pytest.approx(decode.floor_ms / 100)


def test_the_roofline_of_a_mixture_reads_the_experts_that_its_rows_are_expected_to_hit() -> None:
    facts = Experts(8, 2, 16)
    dense = Work(8_000, 10, 4_000, 500, 2, 2)
    work = dataclasses.replace(
        dense, expected_weight_bytes=lambda rows: round(6_000 + 1_000 * facts.expected_hit(rows))
    )
    assert work.step_weight_bytes(1) == dense.step_weight_bytes(5) == 8_000
    prefill, decode = roofline(
        work,
        batch_size=2,
        prompt_tokens=100,
        output_tokens=11,
        ttft_ms=1000,
        tpot_ms=100,
        bandwidth_bytes_per_s=1e5,
        flops_per_s=1e6,
    )
    assert decode.bytes == 6_000 + 3_500 + 2 * 10 * 105.5
    assert prefill.bytes == 6_000 + 8_000 + 2 * 100 * 10


def test_rows_of_a_mixture_state_that_their_floor_assumes_uniform_routing() -> None:
    mixture = ClockworkEngine(arch=SimpleNamespace(has_experts=True, step_state_bytes=0))
    _, row = measure(mixture)
    assert row.step_bytes == 4_000_000 + 4 * 100 * 25
    assert row.as_json()["uniform_routing"] is True
    _, row = measure(ClockworkEngine())
    assert "uniform_routing" not in row.as_json()


@pytest.mark.parametrize(
    ("phase", "memory_ms", "compute_ms", "measured_ms", "kv_frac", "advice"),
    [
        ("decode", 1.0, 0.1, 10.0, 0.1, "launches"),
        ("decode", 1.0, 0.1, 0.5, 0.1, "Faster than the floor"),
        ("decode", 1.0, 0.1, 1.2, 0.1, "fewer bits per weight"),
        ("decode", 1.0, 0.1, 1.2, 0.7, "KV cache"),
        ("decode", 1.0, 2.0, 2.2, 0.1, "FP8 or INT8"),
        ("prefill", 1.0, 9.0, 10.0, 0.0, "weight-only quantization does not shorten it"),
        ("prefill", 9.0, 1.0, 10.0, 0.0, "prefill several requests together"),
    ],
)
def test_advice_follows_from_the_bound(
    phase: str, memory_ms: float, compute_ms: float, measured_ms: float, kv_frac: float, advice: str
) -> None:
    assert advice in advise(
        phase, memory_ms=memory_ms, compute_ms=compute_ms, measured_ms=measured_ms, kv_frac=kv_frac
    )
