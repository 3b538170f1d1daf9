"""Metrics of runs made by hand: percentiles are numpy's, goodput is counted by hand."""

import math

import numpy as np
import pytest

from compress.errors import UsageError
from compress.validate.load.arrivals import Traffic
from compress.validate.load.metrics import conditions, distribution, engine_series, run_metrics
from compress.validate.load.objectives import Objectives, objectives_of, parse_objectives
from compress.validate.load.served import EngineUse, LoadRun, Sample, ServedRequest
from compress.validate.load.workload import LoadRequest, Workload


def served(
    idx: int, arrival_s: float, *times_s: float, error: str = "", sent_s: float | None = None
) -> ServedRequest:
    ended_s = times_s[-1] if times_s else arrival_s
    return ServedRequest(
        idx, arrival_s, arrival_s if sent_s is None else sent_s, 10, times_s, ended_s, error=error
    )


def workload(*output_tokens: int, traffic: Traffic | None = None) -> Workload:
    chosen = traffic or Traffic()
    requests = tuple(LoadRequest(tuple(range(10, 20)), each) for each in output_tokens)
    return Workload("hand", requests, chosen.arrivals_s(len(requests), seed=0), chosen, chosen.mode)


RUN = LoadRun(
    100.0,
    (
        served(0, 100.0, 100.1, 100.2, 100.4),  # TTFT 100, TPOT 150, E2EL 400
        served(1, 100.0, 100.3, 100.3, 100.3, 100.6),  # TTFT 300, TPOT 100, E2EL 600, two of its gaps zero
        served(2, 101.0, 101.05, sent_s=101.02),  # one token: no TPOT
        served(3, 101.0, error="the server answered 500: nothing"),
    ),
)
LOAD = workload(3, 4, 2, 5)


def test_times_and_throughput_are_those_of_the_hand_made_run() -> None:
    found = run_metrics(RUN, LOAD, Objectives())
    assert found["duration"] == pytest.approx(1.05)
    assert (found["completed"], found["failed"], found["short_outputs"]) == (3, 1, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 8)
    assert found["request_throughput"] == pytest.approx(3 / 1.05)
    assert found["output_throughput"] == pytest.approx(8 / 1.05)
    assert found["total_token_throughput"] == pytest.approx(38 / 1.05)
    assert found["median_ttft_ms"] == pytest.approx(100)
    assert found["mean_tpot_ms"] == pytest.approx(125)
    assert found["mean_itl_ms"] == pytest.approx((100 + 200 + 0 + 0 + 300) / 5)
    assert found["p50_itl_ms"] == found["median_itl_ms"] == pytest.approx(100)
    assert found["mean_e2el_ms"] == pytest.approx((400 + 600 + 50) / 3)
    assert found["mean_wait_at_client_ms"] == pytest.approx(20 / 3)
    assert found["tokens_per_chunk"] == pytest.approx(8 / 6)
    assert found["errors"] == ["the server answered 500: nothing"]
    assert found["request_goodput"] is None


@pytest.mark.parametrize(
    ("limits", "num_good"),
    [
        ("ttft:100.001", 2),
        ("ttft:99", 1),
        ("ttft:1000", 3),
        ("tpot:120", 2),  # a request of one token keeps every limit of TPOT
        ("tpot:1 ttft:1000", 1),
        ("ttft:1000,tpot:1000,e2el:500", 2),
        ("e2el:10", 0),
    ],
)
def test_goodput_counts_requests_that_keep_every_limit(limits: str, num_good: int) -> None:
    found = run_metrics(RUN, LOAD, parse_objectives([limits]))
    assert found["request_goodput"] == pytest.approx(num_good / 1.05)
    assert found["goodput_frac"] == num_good / 4


def test_objectives_are_read_as_vllm_spells_them() -> None:
    assert parse_objectives(["ttft:200", "tpot:50", "e2el:5000"]) == Objectives(200.0, 50.0, 5000.0)
    assert parse_objectives([]).limits == {}
    assert objectives_of({"tpot": 12.5}).limits == {"tpot": 12.5}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["itl:5"], "unknown objective 'itl'"),
        (["ttft"], "positive number"),
        (["ttft:-1"], "positive number"),
        (["ttft:nan"], "positive number"),
        (["ttft:1", "ttft:2"], "has a limit already"),
    ],
)
def test_malformed_objectives_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_objectives(texts)


def test_percentiles_are_those_of_numpy() -> None:
    values = np.random.default_rng(0).lognormal(3.0, 1.0, 501)
    found = distribution("ttft", values.tolist())
    for each in (50, 90, 95, 99):
        assert found[f"p{each}_ttft_ms"] == pytest.approx(np.percentile(values, each), rel=1e-12)
    assert found["mean_ttft_ms"] == pytest.approx(values.mean())
    assert found["std_ttft_ms"] == pytest.approx(values.std())
    assert found["median_ttft_ms"] == pytest.approx(np.median(values))
    assert set(distribution("itl", []).values()) == {0.0}


def test_the_keys_are_those_of_vllm_bench_serve() -> None:
    found = run_metrics(RUN, LOAD, Objectives()) | conditions(LOAD)
    times = {
        f"{part}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2el")
        for part in ("mean", "median", "std", "p50", "p90", "p95", "p99")
    }
    counts = {
        *(
            "duration",
            "completed",
            "failed",
            "total_input_tokens",
            "total_output_tokens",
            "request_throughput",
        ),
        *("request_goodput", "output_throughput", "total_token_throughput", "max_concurrent_requests"),
        *("num_prompts", "request_rate", "burstiness", "max_concurrency"),
    }
    assert times | counts <= found.keys()
    assert found["request_rate"] == "inf"


def test_the_peak_of_concurrency_counts_requests_that_were_sent() -> None:
    run = LoadRun(0.0, (served(0, 0.0, 1.0), served(1, 0.5, 2.0), served(2, 0.2, 3.0, sent_s=1.0)))
    assert run.peak_concurrency == 2  # the third was sent as the first one ended
    assert LoadRun(0.0, ()).peak_concurrency == 0


def test_utilization_weighs_samples_by_their_time() -> None:
    samples = (Sample(0.0, 1, 0, 100, 50), Sample(1.0, 2, 1, 200, 200), Sample(4.0, 0, 0, 0, 0))
    use = EngineUse(400, samples, 30, 10, 1, 2, 0, 0)
    assert use.kv_utilization == pytest.approx((50 + 600) / (100 + 600))
    assert (use.peak_running, use.peak_waiting, use.peak_reserved_frac) == (2, 1, 0.5)
    assert EngineUse(400, (), 0, 0, 0, 0, 0, 0).kv_utilization is None
    found = run_metrics(LoadRun(0.0, (served(0, 0.0, 1.0),), use), workload(1), Objectives())
    assert (found["prefix_hit_tokens"], found["prefix_queried_tokens"], found["preemptions"]) == (10, 30, 2)


def test_a_series_is_short_enough_for_a_picture() -> None:
    samples = tuple(Sample(each / 10, 1, 0, 16, 8) for each in range(1001))
    series = engine_series(LoadRun(0.0, (), EngineUse(64, samples, 0, 0, 0, 0, 0, 0)))
    assert len(series) <= 200
    assert series[3]["live_frac"] == 0.125
    assert engine_series(LoadRun(0.0, ())) == []


def test_a_rate_is_a_number_or_the_text_inf() -> None:
    assert conditions(workload(1, 1, traffic=Traffic(2.5)))["request_rate"] == 2.5
    assert conditions(workload(1))["request_rate"] == "inf"
    assert math.isinf(workload(1).request_rate)
