"""Targets are served in turn on the same requests; rows state medians, intervals, and what proves nothing."""

import re
from dataclasses import replace

import pytest

from compress.validate.contention import CpuTimes
from compress.validate.load.arrivals import Traffic
from compress.validate.load.compare import compare_load
from compress.validate.load.document import load_document, load_warnings
from compress.validate.load.lengths import LengthLaw
from compress.validate.load.objectives import Objectives
from compress.validate.load.page import load_text, render_load_page
from compress.validate.load.sweep import random_sweep
from tests.support.scripted_load import ScriptedTarget, load_rows


def test_targets_take_turns_and_get_the_same_requests() -> None:
    turns: list[str] = []
    first, second = (ScriptedTarget(name, 0.01, turns=turns) for name in "ab")
    load_rows(first, second)
    assert "".join(turns) == "abbaab"
    assert first.seen == second.seen
    assert len({each.digest for each in first.seen}) == 3


def test_a_warm_up_is_served_and_not_counted() -> None:
    target = ScriptedTarget("a", 0.01)
    sweep = random_sweep(
        [Traffic()], num_requests=8, prompt=LengthLaw(4), output=LengthLaw(2), vocab_size=99, seed=0
    )
    (row,) = compare_load({"a": target}, sweep.loads[0], repeats=1, warmup=sweep.warmup(3))
    assert [len(each.requests) for each in target.seen] == [3, 8]
    assert len(row.repeats) == 1
    assert row.as_json()["completed"] == 8


def test_a_row_has_the_median_and_the_range_over_repeats() -> None:
    (row,) = load_rows(ScriptedTarget("a", 0.01, factors=(1.0, 1.1, 1.02)))
    found = row.as_json()
    assert found["median_itl_ms"] == pytest.approx(10.2)
    assert found["median_itl_ms_least"] == pytest.approx(10)
    assert found["median_itl_ms_largest"] == pytest.approx(11)
    assert (found["backend"], found["model_id"], found["target"]) == ("compress", "scripted", "a")
    assert found["completed"] == 8
    assert isinstance(found["completed"], int)
    assert found["kv_utilization"] == 0.75
    assert not found["unstable"]


def test_gates_see_the_mean_over_repeats_with_its_interval() -> None:
    (row,) = load_rows(ScriptedTarget("a", 0.01, factors=(1.0, 1.04, 1.02)), objectives=Objectives(ttft=10.3))
    found = row.metrics()
    assert found["itl_ms_p99"].value == pytest.approx(10.2)
    assert found["itl_ms_p99"].lower < 10.0
    assert found["itl_ms_p99"].upper > 10.4
    assert found["ttft_ms_p99"].value == pytest.approx(10.2)
    assert found["goodput"].value > 0
    assert row.unproven() == {}


def test_without_objectives_there_is_no_goodput() -> None:
    (row,) = load_rows(ScriptedTarget("a", 0.01))
    assert row.metrics().keys() == {"ttft_ms_p99", "itl_ms_p99"}
    assert row.as_json()["request_goodput"] is None


def test_repeats_that_disagree_prove_nothing() -> None:
    (row,) = load_rows(ScriptedTarget("a", 0.01, factors=(1.0, 1.5, 2.0)))
    assert "itl_ms_p99" in row.unproven()
    assert row.as_json()["unstable"]
    (warning,) = load_warnings(row)
    assert warning.startswith("a, 4 /s: unstable")


def test_work_of_others_makes_a_row_unstable() -> None:
    moments = iter(range(100))
    sweep = random_sweep(
        [Traffic()], num_requests=2, prompt=LengthLaw(4), output=LengthLaw(2), vocab_size=99, seed=0
    )

    def clock() -> CpuTimes:
        now = next(moments)
        return CpuTimes(run=now * 70, wait=now * 30)

    (row,) = compare_load({"a": ScriptedTarget("a", 0.01)}, sweep.loads[0], repeats=2, clock=clock)
    assert "other work took 30 %" in row.instability


@pytest.mark.parametrize(("factors", "word"), [((1.0, 1.5, 2.0), "slower"), ((2.0, 1.5, 1.0), "faster")])
def test_repeats_that_take_longer_are_slower_by_their_times_and_by_their_throughput(
    factors: tuple[float, ...], word: str
) -> None:
    (row,) = load_rows(ScriptedTarget("a", 0.01, factors=factors), objectives=Objectives(tpot=15.0))
    repeats = tuple(
        {**each, "output_throughput": 100 / time} for each, time in zip(row.repeats, factors, strict=True)
    )
    disturbed = replace(row, repeats=repeats, lost_frac=0.3)
    drifted = disturbed.unproven()
    assert drifted.keys() == {"goodput", "ttft_ms_p99", "itl_ms_p99"}
    for reason in drifted.values():
        assert re.search(rf"the last repeats were \d+ % {word} than the first", reason)
    assert disturbed.instability.count("other work took 30 % of the processor time") == 1


def test_failures_are_counted_and_named() -> None:
    (row,) = load_rows(ScriptedTarget("a", 0.01, error="no room"), repeats=1)
    found = row.as_json()
    assert (found["completed"], found["failed"], found["request_throughput"]) == (0, 8, 0.0)
    assert "8 of 8 requests failed, the first because no room" in load_warnings(row)[0]


@pytest.mark.parametrize("rates", [(4.0,), (2.0, 8.0)])
def test_the_page_is_whole_and_loads_nothing(rates: tuple[float, ...]) -> None:
    targets = [ScriptedTarget("a & b", 0.01), ScriptedTarget("c", 0.02, backend="openai")]
    rows = load_rows(*targets, rates=rates, objectives=Objectives(tpot=15.0))
    document = load_document(rows, seed=0, environment={"device": "a <test>"})
    page = render_load_page(document)
    assert page == render_load_page(document)
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "").replace("https://", "http")
    assert "a &amp; b" in page
    assert "a &lt;test&gt;" in page
    assert "TPOT 15 ms" in page
    assert ("plot sweep" in page) == (len(rates) > 1)
    assert ("plot bars" in page) == (len(rates) == 1)
    assert page.count("plot use-") == 2
    assert "NaN" not in page


def test_a_load_is_named_in_words() -> None:
    base = {"mode": "online", "request_rate": 4.0, "burstiness": 1.0, "max_concurrency": None}
    assert load_text(base) == "4 /s"
    assert load_text(base | {"burstiness": 0.5}) == "4 /s, burstiness 0.5"
    assert load_text(base | {"request_rate": "inf", "mode": "offline"}) == "all at once"
    assert load_text(base | {"request_rate": "inf", "mode": "closed", "max_concurrency": 1}) == "1 client"
    assert load_text(base | {"request_rate": 3.14159, "mode": "trace"}) == "trace, 3.14 /s"
