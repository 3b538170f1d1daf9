"""Latency on an engine whose clock is known exactly, and the roofline on a model whose arithmetic is known exactly."""

import dataclasses
from typing import TYPE_CHECKING, cast

import pytest

from compress.errors import CompressError, UsageError
from compress.runtime.request import Finished, Request
from compress.validate.latency import LatencyRow, measure_latency
from compress.validate.roofline import Work, advise, roofline

if TYPE_CHECKING:
    from compress.runtime.engine import Engine


@dataclasses.dataclass
class ClockworkEngine:
    """Obeys the engine's contract on a clock of its own: 7 ms a prompt, then 1 ms a sequence and token, 10 in the first slow rounds."""

    slow_rounds: int = 0
    short: bool = False
    weight_bytes: int = 1_000_000
    kv_bytes_per_token: int = 100
    now_s: float = 0.0
    seen: list[Request] = dataclasses.field(default_factory=list)
    waiting: list[tuple[Request, float]] = dataclasses.field(default_factory=list)
    rounds: int = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def add(self, request: Request) -> None:
        self.seen.append(request)
        self.waiting.append((request, self.now_s))

    def step(self) -> list[Finished]:
        step_s = (0.001 + (0.009 if self.rounds < self.slow_rounds else 0.0)) * len(self.waiting)
        first_s = self.now_s + 0.007 * len(self.waiting)
        num = self.waiting[0][0].params.max_tokens - self.short
        times_s = tuple(first_s + index * step_s for index in range(num))
        self.now_s = times_s[-1] + 0.5
        self.rounds += 1
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


def measure(
    engine: ClockworkEngine, *, seed: int = 0, repeats: int = 3, warmups: int = 1, output_tokens: int = 10
) -> list[LatencyRow]:
    return measure_latency(
        cast("Engine", engine),
        batch_sizes=[1, 4],
        prompt_tokens=20,
        output_tokens=output_tokens,
        repeats=repeats,
        warmups=warmups,
        vocab_size=50,
        seed=seed,
        bandwidth_bytes_per_s=2e9,
    )


def test_times_are_those_of_the_engines_clock() -> None:
    one, four = measure(ClockworkEngine())
    assert (one.batch_size, four.batch_size) == (1, 4)
    for row, num in ((one, 1), (four, 4)):
        assert (row.ttft_ms_p50.value, row.ttft_ms_p95.value) == pytest.approx((7 * num, 7 * num))
        assert (row.tpot_ms_p50.value, row.tpot_ms_p99.value, row.itl_ms_p99) == pytest.approx(
            (num, num, num)
        )
        assert row.output_tokens_per_s == pytest.approx(num * 10 / (0.007 * num + 9 * 0.001 * num))


def test_the_floor_is_bytes_over_bandwidth_at_the_mean_context() -> None:
    one, four = measure(ClockworkEngine())
    assert one.step_bytes == 1_000_000 + 100 * 25
    assert four.step_bytes == 1_000_000 + 4 * 100 * 25
    assert four.floor_ms == pytest.approx(four.step_bytes / 2e9 * 1e3)
    assert four.floor_frac == pytest.approx(four.floor_ms / 4.0)


def test_warm_up_rounds_are_run_and_not_counted() -> None:
    assert measure(ClockworkEngine(slow_rounds=2), warmups=2)[0].tpot_ms_p99.value == pytest.approx(1.0)
    counted = measure(ClockworkEngine(slow_rounds=2), warmups=1)[0]
    assert counted.tpot_ms_p50.value == pytest.approx(1.0)
    assert counted.tpot_ms_p50.upper == pytest.approx(10.0)


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
    assert all(isinstance(value, int | float | str) for value in flat.values())
    assert "batch_size" not in row.metrics()
    assert row.metrics()["tpot_ms_p95"] == row.tpot_ms_p95


def test_roofline_of_known_arithmetic() -> None:
    work = Work(
        weight_bytes=8_000,
        kv_bytes_per_token=10,
        flops_per_token=4_000,
        head_flops=500,
        attention_flops_per_pair=2,
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
