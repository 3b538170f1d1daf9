"""The comparison of validated models: changes against scipy, claims only where intervals are apart, and
conditions stated and never mixed.
"""

import copy
import json
import math
from typing import Any

import pytest
import scipy.stats

from compress.errors import UsageError
from compress.validate.compare.difference import Difference, difference
from compress.validate.compare.document import compare_document
from compress.validate.compare.dominance import check_objectives, compare_pair
from compress.validate.compare.evidence import Evidence, read_evidence, source_evidence
from compress.validate.compare.page import claims, columns, matrix, render_compare_page, table_rows
from compress.validate.compare.pictures import front, pareto_pictures
from tests.support.evidence_files import MACHINE, report, windows


def evidence(name: str, **facts: Any) -> Evidence:
    return read_evidence(report(name, **facts), name)


def change(metric: str, one: dict[str, Any], other: dict[str, Any]) -> Difference:
    return difference(metric, read_evidence(one, "one"), read_evidence(other, "other"))


def test_accuracy_is_compared_window_by_window_as_scipy_does() -> None:
    one, other = report("one", noise=0.3), report("other", noise=0.33)
    for metric, key, read in (
        ("kl_mean", "kl", lambda value: value),
        ("ppl", "nll_candidate", math.exp),
        ("top1", "top1", lambda value: value),
    ):
        found = change(metric, one, other)
        pairs = windows(one, key), windows(other, key)
        expected = scipy.stats.ttest_rel(*pairs).confidence_interval(0.95)
        assert found.paired
        assert found.change is not None
        assert found.change.lower == pytest.approx(read(expected.low), rel=1e-9, abs=1e-15)
        assert found.change.upper == pytest.approx(read(expected.high), rel=1e-9, abs=1e-15)
    assert change("kl_mean", one, other).verdict == "better"
    assert change("kl_mean", other, one).verdict == "worse"


def test_pairing_decides_what_two_intervals_apart_cannot() -> None:
    one, other = report("one", noise=0.3), report("other", noise=0.31)
    assert change("kl_mean", one, other).verdict == "better"
    for each in (one, other):
        del each["accuracy"]["windows"]  # as reports of earlier versions
    assert one["accuracy"]["kl_mean"]["upper"] > other["accuracy"]["kl_mean"]["lower"]
    found = change("kl_mean", one, other)
    assert (found.verdict, found.paired) == ("undecided", False)


@pytest.mark.parametrize("gap", [1.0, 1.1, 1.21, 1.23, 1.5])
def test_times_differ_exactly_where_their_intervals_are_apart(gap: float) -> None:
    one, other = evidence("one", noise=0.3, tpot_ms=2.0), evidence("other", noise=0.3, tpot_ms=2.0 * gap)
    apart = 2.0 * gap * 0.9 > 2.0 * 1.1
    assert difference("tpot_ms_p50", one, other).verdict == ("better" if apart else "undecided")
    assert difference("tpot_ms_p50", other, one).verdict == ("worse" if apart else "undecided")


def test_a_model_and_itself_differ_in_nothing() -> None:
    one = evidence("one", noise=0.3)
    for metric in ("size_bytes", "kl_mean", "ppl", "top1"):
        assert difference(metric, one, one).verdict == "equal", metric
    assert compare_pair(one, evidence("two", noise=0.3), ("size_bytes", "kl_mean")).winner is None


def test_dominance_needs_evidence_in_every_objective() -> None:
    good = evidence("good", noise=0.2, tpot_ms=1.0)
    for other, winner in (
        (evidence("slower", noise=0.4, tpot_ms=2.0), "good"),
        (evidence("farther alone", noise=0.4, tpot_ms=1.01), None),  # times overlap
        (evidence("faster", noise=0.4, tpot_ms=0.5), None),
        (evidence("smaller", noise=0.4, tpot_ms=2.0, size_bytes=1_000_000), None),
        (evidence("better in all", noise=0.1, tpot_ms=0.5, size_bytes=1_000_000), "better in all"),
        (evidence("unstable", noise=0.4, tpot_ms=2.0, instability="repeats disagree"), "good"),
        (evidence("other text", noise=0.4, tpot_ms=2.0, text="another"), None),
    ):
        pair = compare_pair(good, other)
        assert pair.winner == winner, other.label
        turned = compare_pair(other, good)
        assert turned.winner == winner, other.label
    unstable = evidence("unstable", noise=0.4, instability="repeats disagree")
    assert compare_pair(good, unstable).left_out == {"tpot_ms_p50": "unstable"}


def test_different_conditions_are_said_and_never_mixed() -> None:
    models = [
        evidence("a", noise=0.2),
        evidence("b", noise=0.3),
        evidence("c", noise=0.1, text="other words"),
        evidence("d", noise=0.1, machine={**MACHINE, "device": "another processor"}),
    ]
    document = compare_document(models)
    assert any("different evaluation tokens" in each for each in document["warnings"])
    assert any("different machines" in each for each in document["warnings"])
    groups = {each["name"]: each["groups"] for each in document["conditions"]}
    assert [each["labels"] for each in groups["text"]] == [["a", "b", "d"], ["c"]]
    assert [each["labels"] for each in groups["machine"]] == [["a", "b", "c"], ["d"]]
    for pair in document["pairs"]:
        names = {pair["one"], pair["other"]}
        verdicts = {each["metric"]: each["verdict"] for each in pair["differences"]}
        assert (verdicts["kl_mean"] == "incomparable") == ("c" in names)
        assert (verdicts["tpot_ms_p50"] == "incomparable") == ("d" in names)
        assert verdicts["size_bytes"] == "equal"
        assert pair["winner"] is None or "c" not in names
    drawn = {each["metric"]: each["labels"] for each in pareto_pictures(document)}
    assert drawn == {"size_bytes": ["a", "b", "d"], "tpot_ms_p50": ["a", "b"]}


def test_the_page_and_the_table_hold_every_model_and_load_nothing() -> None:
    reports = {
        "first": report("first", noise=0.2, tpot_ms=1.0),
        "second <b>": report("second", noise=0.4, tpot_ms=2.0),
        "third": report("third", noise=0.3, tpot_ms=None),
    }
    models = [read_evidence(each, label) for label, each in reports.items()]
    sources = [source_evidence(reports["first"], "first")]
    document = json.loads(json.dumps(compare_document(models, sources), allow_nan=False))
    page = render_compare_page(document)
    assert page == render_compare_page(document)
    assert "second &lt;b&gt;" in page
    assert "<b>" not in page
    assert not any(word in page for word in ("<script", "<link", "@import", "src=", 'href="http'))
    assert page.count('class="plot ') == 2
    assert claims(document) == [
        "first dominates second <b>: better in KL and TTFT and TPOT, equal in size.",
        "first dominates third: better in KL, equal in size; "
        "left out: TTFT and TPOT (not measured for third).",
        "third dominates second <b>: better in KL, equal in size; "
        "left out: TTFT and TPOT (not measured for third).",
    ]
    rows = table_rows(document)
    assert [row[0] for row in rows] == ["model", "first", "second <b>", "third", "builtin://any"]
    assert rows[0][2:] == ["size", "KL", "perplexity", "top-1", "TTFT", "TPOT"]
    assert columns(document)[:2] == ["size_bytes", "kl_mean"]
    cells = matrix(document)
    assert cells[0][0] is None
    for row in range(3):
        for column in range(row):
            one, other = cells[row][column], cells[column][row]
            assert one is not None
            assert other is not None
            assert one["winner"] == other["winner"]
            mirror = {"better": "worse", "worse": "better"}
            assert {name: mirror.get(each, each) for name, each in one["verdicts"].items()} == other[
                "verdicts"
            ]


def test_the_front_is_what_no_other_point_beats_in_both() -> None:
    points = {"a": (5, 0.1), "b": (3, 0.2), "c": (4, 0.25), "d": (1, 0.4), "e": (5, 0.3)}
    models = [
        {
            "label": label,
            "readings": {
                "size_bytes": {"value": size, "unproven": ""},
                "kl_mean": {"value": kl, "unproven": ""},
            },
        }
        for label, (size, kl) in points.items()
    ]
    beaten = {
        label
        for label, (size, kl) in points.items()
        if any(s <= size and k <= kl and (s, k) != (size, kl) for s, k in points.values())
    }
    assert {each["label"] for each in front(models, "size_bytes")} == points.keys() - beaten


def test_tasks_are_compared_on_the_same_items_and_decide_too() -> None:
    good = evidence("good", noise=0.2, task=(0.79, 0.01, 500))
    bad = evidence("bad", noise=0.4, tpot_ms=3.0, task=(0.7, 0.01, 500))
    near = evidence("near", noise=0.4, tpot_ms=3.0, task=(0.78, 0.01, 500))
    fewer = evidence("fewer", noise=0.4, tpot_ms=3.0, task=(0.7, 0.01, 100))
    document = compare_document([good, bad, near, fewer])
    first = {pair["other"]: pair for pair in document["pairs"] if pair["one"] == "good"}
    verdicts = {name: pair["differences"][-1]["verdict"] for name, pair in first.items()}
    assert verdicts == {"bad": "better", "near": "undecided", "fewer": "incomparable"}
    assert {name: pair["winner"] for name, pair in first.items()} == {
        "bad": "good",
        "near": None,
        "fewer": "good",
    }
    assert first["fewer"]["left_out"] == {"tasks.mine": "other items"}
    assert any("different items of tasks.mine" in each for each in document["warnings"])
    assert table_rows(document)[0][-1] == "mine"
    assert "79.00 %" in render_compare_page(document)


def test_the_batch_size_of_times_is_the_smallest_or_the_one_asked_for() -> None:
    document = report("one", noise=0.2)
    assert read_evidence(document, "one").conditions["latency"].startswith("batch 1,")
    assert read_evidence(document, "one", batch_size=4).conditions["latency"].startswith("batch 4,")
    assert "tpot_ms_p50" not in read_evidence(document, "one", batch_size=3).readings


def test_wrong_questions_get_a_sentence() -> None:
    one = evidence("one", noise=0.2)
    with pytest.raises(UsageError, match="at least two"):
        compare_document([one])
    with pytest.raises(UsageError, match="called one"):
        compare_document([one, one])
    with pytest.raises(UsageError, match="Did you mean 'size_bytes'"):
        check_objectives(["size_byte"])
    with pytest.raises(UsageError, match="nothing about accuracy"):
        check_objectives(["size_bytes"])
    assert check_objectives(["kl_mean", "kl_mean"]) == ("kl_mean",)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((), []),
        (("schema",), 2),
        (("artifact",), 3),
        (("artifact", "digest"), None),
        (("artifact", "sizes"), [{"source_bytes": -1, "candidate_bytes": 1}]),
        (("artifact", "sizes"), ["no"]),
        (("accuracy", "kl_mean"), {"value": "low"}),
        (("accuracy", "kl_mean", "upper"), float("nan")),
        (("accuracy", "num_windows"), 1e9),
        (("accuracy", "windows", "kl"), [0.1]),
        (("accuracy", "windows", "kl"), "none"),
        (("latency",), []),
        (("latency", "candidate"), [{"batch_size": True}]),
        (("latency", "candidate", 0, "tpot_ms_p50_upper"), "inf"),
        (("environment",), "here"),
        (("calibration", "evaluation_digest"), 5),
        (("load",), {"rows": [{"target": "candidate"}]}),
    ],
)
def test_a_report_that_is_none_is_refused_in_a_sentence(path: tuple[Any, ...], value: Any) -> None:
    document: Any = copy.deepcopy(report("one", noise=0.2))
    if path:
        place = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
    else:
        document = value
    for read in (read_evidence, source_evidence):
        with pytest.raises(UsageError):
            read(document, "one")
