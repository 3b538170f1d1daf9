"""Loading by reference, `quantize` and `run` from Python: the same artifacts as the command line makes."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import compress
from compress import SamplingParams
from compress.artifact.manifest import open_artifact, verify_artifact
from compress.cli.app import main
from compress.errors import EnvironmentUnfit, RecipeError, StorageError, UsageError
from compress.recipe import dump_yaml
from tests.support.tiny_run import RECIPE

STAGES = [RECIPE["stages"][0], {"kind": "quantize", "round": {"kind": "rtn"}}, {"kind": "export"}]
QUICK: dict[str, Any] = {"round": {"kind": "rtn"}, "num_samples": 4, "seq_len": 16, "device": "cpu"}
WORDS = SamplingParams(max_tokens=4)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def recipe(model_dir: Path) -> dict[str, Any]:
    return {"version": 1, "seed": 3, "model": str(model_dir), "stages": STAGES}


#
# ------------------------------------------------------------------------------------------------------------
# run


def test_a_recipe_runs_from_a_path_a_text_and_a_mapping(recipe: dict[str, Any], work: Path) -> None:
    (work / "tiny.yaml").write_text(dump_yaml(recipe))
    results = [
        compress.run("tiny.yaml", device="cpu"),
        compress.run(dump_yaml(recipe), device="cpu"),
        compress.run(recipe, device="cpu", run_dir="mine"),
    ]
    assert len({each.digest for each in results}) == 1
    assert [each.status for each in results] == ["done"] * 3
    assert [each.cached for each in results[1].run.steps] == [True] * 3
    assert [each.run_dir.path for each in results][::2] == [Path("runs/tiny"), Path("mine")]
    assert results[1].run_dir.path.parent == Path("runs")
    assert open_artifact(results[0].path).digest == results[0].digest
    assert results[0].exit_code == 0
    assert results[0].report is None
    assert set(results[0].facts) == {"calibrate", "quantize", "export"}


def test_a_run_from_python_and_one_from_the_command_line_are_one(
    recipe: dict[str, Any], work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (work / "tiny.yaml").write_text(dump_yaml(recipe))
    result = compress.run(Path("tiny.yaml"), device="cpu")
    assert main(["run", "tiny.yaml", "--device", "cpu", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    expected = {"schema": 1, "exit_code": 0, **result.as_json()}
    for run in (document, expected):
        run.pop("seconds")
        for stage in run["stages"]:
            del stage["cached"], stage["seconds"]
    assert document == expected


def test_a_gate_that_fails_is_a_result(recipe: dict[str, Any], work: Path) -> None:
    gates = {"size_ratio": 0.0001}
    validate = {**RECIPE["stages"][3], "gates": gates, "latency": None}
    result = compress.run({**recipe, "stages": [*STAGES, validate]}, device="cpu")
    assert (result.status, result.exit_code) == ("gate_failed", 3)
    assert [gate["passed"] for gate in result.gates] == [False]
    assert result.report is not None
    assert "<html" in result.report.read_text()


def test_a_run_may_stop_early_and_progress_is_logged(
    recipe: dict[str, Any], work: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="compress"):
        result = compress.run(recipe, device="cpu", until="calibrate")
    assert result.status == "stopped"
    with pytest.raises(UsageError, match="made no artifact"):
        result.path  # noqa: B018
    assert "calibrate built in" in caplog.text


@pytest.mark.parametrize("wrong", ["missing.yaml", "version: 1\nmodel: x\n", {"version": 1, "stages": []}])
def test_what_is_no_recipe_is_an_error_that_names_its_place(wrong: Any, work: Path) -> None:
    with pytest.raises(RecipeError, match=r"missing\.yaml|recipe\.yaml:"):
        compress.run(wrong, device="cpu")


#
# ------------------------------------------------------------------------------------------------------------
# quantize


def test_quantize_makes_the_artifact_of_a_recipe(model_dir: Path, work: Path) -> None:
    result = compress.quantize(model_dir, "W8A16", out="w8", seed=3, **QUICK)
    stages = [
        {"kind": "calibrate", "num_samples": 4, "seq_len": 16},
        {"kind": "quantize", "scheme": "W8A16", "round": {"kind": "rtn"}},
        {"kind": "export"},
    ]
    same = compress.run({"version": 1, "seed": 3, "model": str(model_dir), "stages": stages}, device="cpu")
    assert result.digest == same.digest
    assert result.path == Path("w8")
    verify_artifact(open_artifact(Path("w8")))
    assert (Path("w8") / "tokenizer.json").is_file()
    assert len(compress.load("w8", device="cpu").generate("import ", WORDS)[0].token_ids) == 4


def test_quantize_validates_when_asked(model_dir: Path, work: Path) -> None:
    result = compress.quantize(
        model_dir, "W8A16", validate={"num_samples": 2, "seq_len": 16, "latency": None}, **QUICK
    )
    assert result.report is not None
    assert (
        json.loads(result.report.with_name("report.json").read_text())["accuracy"]["ppl_ratio"]["value"] > 0
    )


def test_quantize_refuses_a_full_directory_before_any_work(model_dir: Path, work: Path) -> None:
    (work / "full").mkdir()
    (work / "full" / "file").touch()
    with pytest.raises(UsageError, match="not an empty directory"):
        compress.quantize(model_dir, out="full")
    assert not (work / ".compress").exists()


def test_a_wrong_setting_of_quantize_is_named(model_dir: Path, work: Path) -> None:
    with pytest.raises(RecipeError, match="rnd: unknown key"):
        compress.quantize(model_dir, rnd={"kind": "rtn"}, device="cpu")
    with pytest.raises(RecipeError, match="Did you mean 'W4A16_G128'"):
        compress.quantize(model_dir, "W4A16_G12", device="cpu")


#
# ------------------------------------------------------------------------------------------------------------
# load


def test_a_model_is_loaded_from_a_registry_and_kept(recipe: dict[str, Any], work: Path) -> None:
    push = {"to": "layout://registry", "name": "tiny", "aliases": ["best"]}
    result = compress.run({**recipe, "push": push}, device="cpu")
    expected = compress.load(result.path, device="cpu").generate("import ", WORDS)
    for ref in ("layout://registry/tiny:best", "layout://registry/tiny"):
        llm = compress.load(ref, device="cpu", cache_dir="kept")
        assert llm.generate("import ", WORDS)[0].token_ids == expected[0].token_ids
    (copy,) = Path("kept").iterdir()
    assert open_artifact(copy).digest == result.digest
    with pytest.raises(UsageError, match="has no tag 'bets'"):
        compress.load("layout://registry/tiny:bets", device="cpu")


def test_the_bundled_model_is_loaded_by_name() -> None:
    llm = compress.load("builtin://reference", device="cpu", max_model_len=32, dtype="float32")
    assert llm.engine.dtype == torch.float32
    assert llm.generate("def add(a, b):", WORDS)[0].text.startswith("\n    ")
    with pytest.raises(UsageError, match="32 tokens at most"):
        llm.generate("a", SamplingParams(max_tokens=64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bf16"}, "Did you mean 'bfloat16'"),
        ({"kv_format": "INT8_TOKEN_HEADS"}, "Did you mean 'INT8_TOKEN_HEAD'"),
        ({"speculative": "draft"}, "carries no draft"),
        ({"speculative": "nowhere"}, "which is no directory"),
        ({"speculative": "ngram", "num_draft_tokens": 8}, "it must be in 1..7"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"device": "gpu"}, "not a device"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options: dict[str, Any], message: str, model_dir: Path) -> None:
    with pytest.raises(UsageError, match=message):
        compress.load(model_dir, **{"device": "cpu", **options})


def test_a_reference_that_means_nothing_is_refused(work: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        compress.load("nowhere", device="cpu")
    with pytest.raises(UsageError, match="Known: builtin, hf, layout"):
        compress.load("s4://bucket/model", device="cpu")
    with pytest.raises(StorageError, match="in the local cache"):
        compress.load("hf://nobody/nothing", device="cpu", offline=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_an_error() -> None:
    with pytest.raises(EnvironmentUnfit, match="no usable GPU"):
        compress.load("builtin://reference", device="cuda")


def test_the_package_offers_the_interface_without_importing_it() -> None:
    import compress.api

    assert compress.__all__ == compress.api.__all__
    assert set(compress.__all__) <= set(dir(compress))
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        compress.laod  # type: ignore[attr-defined]  # noqa: B018
