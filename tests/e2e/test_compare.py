"""`compress compare` of evidence, runs, artifacts of runs and checkpoints that nobody validated yet."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.evidence_files import report, write_evidence
from tests.support.tiny_model import write_tiny_model
from tests.support.tiny_run import RECIPE

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def proofs(work: Path) -> dict[str, Path]:
    return {
        name: write_evidence(work / name / "evidence", report(name, noise=noise, tpot_ms=tpot_ms))
        for name, noise, tpot_ms in (("good", 0.2, 1.0), ("bad", 0.4, 2.0), ("middle", 0.3, 4.0))
    }


def test_evidence_is_compared_wherever_it_lies(proofs: dict[str, Path], command: Command, work: Path) -> None:
    places = ("good", work / "bad" / "evidence", f"third={work}/middle/evidence/report.json")
    code, out, err = command("compare", *places, "--html", "page.html", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert [each["label"] for each in document["models"]] == ["good", "bad", "third"]
    winners = {(each["one"], each["other"]): each["winner"] for each in document["pairs"]}
    assert winners == {("good", "bad"): "good", ("good", "third"): "good", ("bad", "third"): None}
    assert "dominates bad" in (work / "page.html").read_text()
    code, out, err = command("compare", *places, "--by", "size_bytes,kl_mean")
    assert code == 0, err
    assert "third dominates bad" in out
    assert out.splitlines()[0].split() == [
        "model",
        "form",
        "size",
        "KL",
        "perplexity",
        "top-1",
        "TTFT",
        "TPOT",
    ]


def test_a_run_its_artifact_and_a_new_checkpoint_meet_under_one_set_of_conditions(
    recipe: Callable[..., Path], command: Command, model_dir: Path, work: Path
) -> None:
    calibrate, quantize, export, validate = RECIPE["stages"]
    stages = [calibrate, {**quantize, "round": {"kind": "rtn"}}, export, {**validate, "latency": None}]
    for name in ("one", "two"):
        code, _, err = command("run", recipe(stages=stages, seed=len(name)), "--run-dir", f"runs/{name}")
        assert code == 0, err
    own = ("--num-samples", 4, "--seq-len", 32, "--no-latency", "--json")
    models = ("one=runs/one", "two=runs/two/artifacts/export", f"dense={model_dir}")
    code, _, err = command("compare", *models)
    assert code == 2
    assert "has no evidence" in err
    code, out, err = command("compare", *models, "--against", model_dir, *own)
    assert code == 0, err
    document = json.loads(out)
    readings = {each["label"]: each["readings"] for each in document["models"]}
    assert readings["one"] == readings["two"]
    assert readings["dense"]["kl_mean"]["value"] == 0
    assert {each["winner"] for each in document["pairs"]} == {None}  # smaller and farther
    assert document["warnings"] == []
    assert [each.name for each in (work / "comparison").iterdir()] == ["dense"]
    code, again, err = command("compare", *models, "--against", model_dir, *own)
    assert code == 0, err
    assert json.loads(again)["models"] == document["models"]  # found again, not measured
    code, _, err = command("compare", "dense=runs/one/artifacts/quantize", "runs/two", "--against", model_dir)
    assert code == 2
    assert "another model" in err
    other = write_tiny_model(work / "other", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    for against, words, reason in (
        (other, own, f"its source {model_dir} is another model than {other}"),
        (model_dir, ("--num-samples", 5, *own[2:]), "4 windows of 32 tokens, not 5 of 32"),
        (model_dir, (*own, "--data", "builtin://python"), "text is not that of builtin://python"),
        (model_dir, own[:4], "its latency was not measured"),
        (model_dir, (*own, "--proofs", "runs"), "has no evidence"),
    ):
        (work / "runs" / "dense").mkdir(exist_ok=True)
        code, _, err = command("compare", *models, "--against", against, *words)
        assert code == 2, words
        assert reason in err


def test_a_path_with_an_equals_sign_is_a_path_where_it_exists(
    proofs: dict[str, Path], command: Command, work: Path
) -> None:
    (work / "good").rename(work / "lr=1")
    code, out, err = command("compare", "lr=1", "bad", "--json")
    assert code == 0, err
    assert [each["label"] for each in json.loads(out)["models"]] == ["lr=1", "bad"]


def test_a_model_that_was_not_timed_at_the_batch_size_is_named(
    proofs: dict[str, Path], command: Command, work: Path
) -> None:
    large = report("large", noise=0.2)
    large["latency"]["candidate"][1]["batch_size"] = 8
    write_evidence(work / "large" / "evidence", large)
    code, _, err = command("compare", "good", "large", "--batch-size", 8)
    assert code == 0, err
    assert "good: not timed at batch size 8" in err


def test_wrong_comparisons_get_a_sentence_and_code_2(
    proofs: dict[str, Path], command: Command, work: Path
) -> None:
    for words, reason in (
        (["good"], "at least two"),
        (["good", "good"], "two models are called good"),
        (["good", "nothing"], "does not exist"),
        (["good", "bad", "--by", "kl"], "unknown objective"),
        (["good", f"{work}"], "no evidence"),
        (["=good", "bad"], "=good has an empty side; write NAME=MODEL"),
        (["good", "name="], "name= has an empty side"),
        (
            ["good", "bad", "--batch-size", 7],
            "no model was timed at this batch size; batch sizes that were timed: 1, 4.",
        ),
    ):
        code, _, err = command("compare", *words)
        assert code == 2, (words, err)
        assert reason in err
    changed = json.loads((proofs["bad"] / "report.json").read_text())
    changed["accuracy"]["kl_mean"]["value"] = 0.0
    (proofs["bad"] / "report.json").write_text(json.dumps(changed))
    code, _, err = command("compare", "good", "bad")
    assert code == 5
    assert "has changed since" in err
