"""Gates compare the unfavourable end of an interval, know their direction and their device, and refuse what
they do not know.
"""

import dataclasses
from typing import Any

import pytest

from compress.errors import UsageError
from compress.validate.accuracy import Accuracy
from compress.validate.gates import METRICS, Gate, evaluate, parse_gates
from compress.validate.latency import LatencyRow
from compress.validate.load.compare import LOAD_GATES
from compress.validate.payoff import SpeedRow
from compress.validate.stats import Estimate


def only(raw: dict[str, Any], value: Estimate, *, device: str = "cpu") -> tuple[bool | None, float | None]:
    (result,) = evaluate(parse_gates(raw), {next(iter(raw)): value}, device=device)
    return result.passed, result.bound


def test_an_upper_limit_compares_the_upper_bound() -> None:
    assert only({"kl_mean": 0.05}, Estimate(0.04, 0.03, 0.05)) == (True, 0.05)
    assert only({"kl_mean": 0.05}, Estimate(0.04, 0.03, 0.0501)) == (False, 0.0501)


def test_a_lower_limit_compares_the_lower_bound() -> None:
    assert only({"top1": 0.9}, Estimate(0.95, 0.9, 1.0)) == (True, 0.9)
    assert only({"top1": 0.9}, Estimate(0.95, 0.89, 1.0)) == (False, 0.89)


def test_a_failure_by_uncertainty_alone_says_so() -> None:
    gates = parse_gates({"kl_mean": 0.05})
    (lucky,) = evaluate(gates, {"kl_mean": Estimate(0.04, 0.03, 0.06)}, device="cpu")
    (plain,) = evaluate(gates, {"kl_mean": Estimate(0.06, 0.055, 0.07)}, device="cpu")
    assert "confidence" in lucky.note
    assert plain.note == ""


def test_a_limit_in_time_applies_on_its_device_only() -> None:
    gates = parse_gates({"tpot_ms_p50": {"cuda-sm90": 2.0, "cpu": 30}})
    on_gpu, on_cpu = evaluate(gates, {"tpot_ms_p50": Estimate(3.0, 2.9, 3.1)}, device="cpu")
    assert (on_gpu.passed, on_gpu.value) == (None, None)
    assert "cuda-sm90" in on_gpu.note
    assert (on_cpu.passed, on_cpu.limit) == (True, 30.0)


def test_what_was_not_measured_does_not_pass() -> None:
    (result,) = evaluate(parse_gates({"kl_p99": 1}), {}, device="cpu")
    assert (result.passed, result.note) == (False, "not measured")


def test_what_was_measured_and_proves_nothing_does_not_pass() -> None:
    gates = parse_gates({"tpot_ms_p50": {"cpu": 30}, "kl_mean": 1.0})
    metrics = {"tpot_ms_p50": Estimate(3.0, 2.9, 3.1), "kl_mean": Estimate.exact(0.5)}
    reason = {"tpot_ms_p50": "repeats spread over 80 % of their median"}
    timed, judged = evaluate(gates, metrics, device="cpu", unproven=reason)
    assert (timed.passed, timed.value, timed.bound) == (False, None, None)
    assert timed.note.startswith("no evidence: 3 was measured, but repeats spread over 80 %")
    assert judged.passed
    (elsewhere,) = evaluate(gates[:1], metrics, device="cuda-sm90", unproven=reason)
    assert elsewhere.passed is None


def test_a_number_taken_after_an_earlier_stage_is_its_own_metric() -> None:
    gates = parse_gates({"quantize.top1": 0.9}, stages=["prune", "quantize"])
    assert gates == (Gate("quantize.top1", 0.9, None),)
    (result,) = evaluate(
        gates, {"top1": Estimate.exact(0.1), "quantize.top1": Estimate.exact(0.95)}, device="cpu"
    )
    assert (result.passed, result.relation) == (True, ">=")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"kl_men": 1}, "Did you mean 'kl_mean'"),
        ({"quantise.kl_mean": 1}, "Did you mean 'quantize'"),
        ({"kl_mean": "low"}, "must be a number"),
        ({"kl_mean": True}, "must be a number"),
        ({"kl_mean": float("nan")}, "must be a number"),
        ({"kl_mean": {"cpu": 1}}, "must be a number"),
        ({"tpot_ms_p50": 2.0}, "cuda-sm90: 2.0"),
        ({"tpot_ms_p50": {"h200": 2.0}}, "'h200' is not a device"),
    ],
)
def test_a_gate_that_cannot_be_understood_is_refused_before_anything_runs(
    raw: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        parse_gates(raw, stages=["quantize"])


def test_every_metric_but_the_size_and_those_of_tasks_is_measured_by_a_part_of_validation() -> None:
    measured = {field.name for part in (Accuracy, LatencyRow, SpeedRow) for field in dataclasses.fields(part)}
    assert set(METRICS) - measured - LOAD_GATES.keys() == {"size_ratio", "accuracy_drop"}
    timed = {field.name for field in dataclasses.fields(LatencyRow)} | {"speedup"} | LOAD_GATES.keys()
    assert {name for name, metric in METRICS.items() if metric.per_device} == set(METRICS) & timed
