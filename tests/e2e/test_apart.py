"""Validation of models that do not fit the memory together: the same numbers, and a source scored once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_run import RECIPE

Command = Callable[..., tuple[int, str, str]]
Recipe = Callable[..., Path]


def report_of(recipe: Recipe, command: Command, name: str, **keys: Any) -> dict[str, Any]:
    *stages, validate = RECIPE["stages"]
    path = recipe(f"{name}.yaml", stages=[*stages, {**validate, **keys}])
    code, _, err = command("run", path, "--run-dir", name, "--device", "cpu", "--workspace", "workspace")
    assert code == 0, err
    return json.loads(Path(name, "evidence", "report.json").read_text())


@pytest.mark.slow
def test_one_after_the_other_gives_the_numbers_of_side_by_side(
    recipe: Recipe, command: Command, work: Path
) -> None:
    together = report_of(recipe, command, "together")
    apart = report_of(recipe, command, "apart", apart={})
    kept = {path: path.stat().st_mtime_ns for path in Path("workspace", "kept").glob("scores-*/*")}
    assert kept
    streamed = report_of(recipe, command, "streamed", apart={"streamed": True})
    now = {path: path.stat().st_mtime_ns for path in Path("workspace", "kept").glob("scores-*/*")}
    assert now == kept, "the source was scored already"
    for found in (apart, streamed):
        assert found["accuracy"] == together["accuracy"]
        assert found["scoring"]["kl_mean_lower"] == found["scoring"]["kl_mean"]
        assert found["latency"]["candidate"]
        assert not found["latency"].get("source")
    assert "scoring" not in together
    for path in kept:
        path.unlink()
    alone = report_of(recipe, command, "alone", apart={"streamed": True}, gates={"ppl_ratio": 2.5})
    assert alone["accuracy"] == together["accuracy"], "streamed from the beginning"
    page = Path("alone", "evidence", "report.html").read_text()
    assert "its layers read from disk one at a time" in page
    assert "one after the other" in Path("alone", "evidence", "README.md").read_text()


@pytest.mark.slow
def test_the_likeliest_tokens_estimate_the_gated_kl(recipe: Recipe, command: Command, work: Path) -> None:
    together = report_of(recipe, command, "together")
    found = report_of(recipe, command, "few", apart={"top_k": 20}, gates={"kl_mean": 5.0})
    exact = together["accuracy"]["kl_mean"]["value"]
    estimate = found["accuracy"]["kl_mean"]
    assert found["scoring"]["kl_mean_lower"] <= exact
    assert estimate["lower"] <= exact <= estimate["upper"]
    assert estimate["value"] == found["scoring"]["kl_mean"] == found["gates"][0]["value"]
    assert found["accuracy"]["ppl_ratio"] == together["accuracy"]["ppl_ratio"]
    assert "is an unbiased estimate" in Path("few", "evidence", "report.html").read_text()


@pytest.mark.slow
def test_the_weights_in_between_are_scored_too(recipe: Recipe, command: Command, work: Path) -> None:
    calibrate, *rest, validate = RECIPE["stages"]
    stages = [calibrate, {"kind": "prune", "ffn": {"keep": 0.5}, "multiple": 32}, *rest]
    found = {}
    for name, apart in {"together": None, "apart": {"streamed": True}}.items():
        own = {**validate, "apart": apart, "latency": None, "gates": {"quantize.kl_mean": 5.0}}
        path = recipe(f"{name}.yaml", stages=[*stages, own])
        code, _, err = command("run", path, "--run-dir", name, "--device", "cpu", "--workspace", "workspace")
        assert code == 0, err
        found[name] = json.loads(Path(name, "evidence", "report.json").read_text())
    assert found["apart"]["accuracy"] == found["together"]["accuracy"]
    assert found["apart"]["gates"] == found["together"]["gates"]


def test_the_plan_states_memory_disk_and_reading(recipe: Recipe, command: Command, work: Path) -> None:
    *stages, validate = RECIPE["stages"]
    streamed = {**validate, "apart": {"streamed": True, "top_k": 8}}
    code, out, err = command("plan", recipe(stages=[*stages, streamed]), "--offline")
    assert code == 0, err
    text = " ".join(out.split())
    assert "the source read layer by layer" in text
    assert "8 likeliest tokens" in text
    assert "are read from disk" in text


@pytest.mark.parametrize(
    "keys",
    [
        {"load": {"prompt_tokens": 8, "output_tokens": 4, "num_requests": 2}},
        {"long_context": {"seq_len": 64, "num_samples": 2, "depths": []}},
    ],
)
def test_what_needs_both_models_is_refused(
    recipe: Recipe, command: Command, work: Path, keys: dict[str, Any]
) -> None:
    *stages, validate = RECIPE["stages"]
    code, _, err = command("run", recipe(stages=[*stages, {**validate, "apart": {}, **keys}]))
    assert code == 2
    assert f"leave out {next(iter(keys))} or apart" in " ".join(err.split())
