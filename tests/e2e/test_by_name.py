"""A model that the decoder does not support, from the refusal of an ordinary recipe to a published checkpoint
that `transformers` measured."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.artifact.tensors import load_tensors
from tests.support.tiny_unknown import save_unknown

Command = Callable[..., tuple[int, str, str]]
BY_NAME = {"kind": "quantize_by_name", "scheme": "FP8_DYNAMIC"}
VALIDATE = {"kind": "validate", "num_samples": 4, "seq_len": 32, "gates": {"kl_mean": 1.0}}


@pytest.fixture(scope="session")
def unknown_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("unknown")
    save_unknown(path, "diffllama", max_shard_size="400KB")
    shutil.copy(model_dir / "tokenizer.json", path)
    return path


@pytest.fixture
def unknown(recipe: Callable[..., Path], unknown_dir: Path) -> Callable[..., Path]:
    """Writes a recipe of these stages for the model that the decoder does not support."""

    def write(*stages: Any, **changes: Any) -> Path:
        return recipe(model=str(unknown_dir), stages=list(stages), **changes)

    return write


@pytest.mark.parametrize("verb", ["plan", "run"])
def test_the_refusal_of_an_ordinary_recipe_names_this_way(
    verb: str, unknown: Callable[..., Path], command: Command
) -> None:
    code, out, err = command(verb, unknown({"kind": "quantize"}, {"kind": "export"}), "--offline")
    assert (code, out) == (2, "")
    assert "architecture 'diffllama' (DiffLlamaForCausalLM) is not supported" in err
    assert "{kind: quantize_by_name, scheme: FP8_DYNAMIC}" in err


def test_a_run_writes_measures_and_publishes_and_says_what_is_not_proven(
    unknown: Callable[..., Path], command: Command
) -> None:
    file = unknown(BY_NAME, VALIDATE, push={"to": "layout://registry", "name": "neox"})
    code, out, err = command("plan", file, "--offline", "--json")
    assert code == 0, err
    planned = json.loads(out)["stages"]
    assert "14 linears" in planned[0]["notes"][0]
    assert "no latency" in " ".join(planned[1]["notes"])
    code, out, err = command("run", file, "--offline")
    assert code == 0, err
    told = "not validated on the bundled runtime: accuracy was measured through transformers"
    assert told in " ".join(out.split())
    assert "pushed" in out
    evidence = Path("runs/recipe/evidence")
    report = json.loads((evidence / "report.json").read_text())
    assert report["by_name"]["quantized"] == 14
    assert report["accuracy"]["kl_mean"]["value"] > 0
    assert "latency" not in report
    for name in ("README.md", "report.html"):
        assert "not validated on the bundled runtime" in (evidence / name).read_text()
    artifact = Path("runs/recipe/artifacts/quantize_by_name")
    manifest = json.loads((artifact / "compress.json").read_text())
    assert "not validated on the bundled runtime" in manifest["facts"]["warnings"][0]
    code, out, err = command("inspect", artifact)
    assert code == 0
    assert "not validated on the bundled runtime" in out
    code, out, err = command("run", file, "--offline", "--if-changed", "--json")
    assert (code, json.loads(out)["status"]) == (0, "unchanged")
    sides = ("--against", json.loads((evidence / "report.json").read_text())["artifact"]["source"])
    code, out, err = command(
        "validate",
        artifact,
        *sides,
        "--num-samples",
        4,
        "--seq-len",
        32,
        "--gate",
        "kl_mean=1e-12",
        "--offline",
    )
    assert code == 3, err
    assert "not validated on the bundled runtime" in " ".join(err.split())


def test_without_validation_the_run_says_so_too(unknown: Callable[..., Path], command: Command) -> None:
    code, out, err = command("run", unknown({**BY_NAME, "scheme": "W4A16_G64"}), "--offline")
    assert code == 0, err
    assert "not validated on the bundled runtime" in " ".join(out.split())


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        (({"kind": "quantize"}, BY_NAME), "'quantize_by_name' reads the recipe's model itself"),
        ((BY_NAME, {"kind": "quantize"}), "'quantize_by_name' reads the recipe's model itself"),
        ((BY_NAME, {"kind": "export"}), "'export' would replace the checkpoint that 'quantize_by_name' made"),
        (
            (BY_NAME, {**VALIDATE, "gates": {"tpot_ms_p50": {"cpu": 9}}}),
            "limits what the bundled runtime measures",
        ),
        ((BY_NAME, {**VALIDATE, "apart": {}}), "which holds both models: leave out apart"),
        (({**BY_NAME, "scheme": "FP8_STATIC"},), "takes a scale of the inputs"),
        (({**BY_NAME, "ignore": ["*.nothing"]},), "the pattern '*.nothing' matches no matrix"),
        (({**BY_NAME, "scheme": "W4A16_G128", "format": "fp8"},), "fp8 is written in FP8_BLOCK alone"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(
    stages: tuple[Any, ...], sentence: str, unknown: Callable[..., Path], command: Command
) -> None:
    code, _, err = command("run", unknown(*stages), "--offline")
    assert code == 2
    assert sentence in " ".join(err.split())
    assert not Path("runs").exists()


def test_validation_of_what_predicts_no_token_is_refused(
    unknown_dir: Path, recipe: Callable[..., Path], command: Command, tmp_path: Path
) -> None:
    for name, sentence in (
        ("t5", "no causal language model of model_type 't5'"),
        ("bert", "BertForMaskedLM"),
    ):
        path = tmp_path / name
        path.mkdir()
        save_unknown(path, name)
        shutil.copy(unknown_dir / "tokenizer.json", path)
        code, _, err = command("run", recipe(model=str(path), stages=[BY_NAME, VALIDATE]), "--offline")
        assert code == 2
        assert sentence in " ".join(err.split())
        code, _, err = command("run", recipe(model=str(path), stages=[BY_NAME]), "--offline")
        assert code == 0, err


def test_a_model_of_the_decoder_gets_the_same_codes_by_name(
    recipe: Callable[..., Path], command: Command
) -> None:
    rtn = {"kind": "quantize", "scheme": "FP8_DYNAMIC", "round": {"kind": "rtn"}}
    assert command("run", recipe("a.yaml", stages=[rtn, {"kind": "export"}]), "--offline")[0] == 0
    assert command("run", recipe("b.yaml", stages=[BY_NAME]), "--offline")[0] == 0
    ours = load_tensors(Path("runs/a/artifacts/export/model.safetensors"))
    named = load_tensors(Path("runs/b/artifacts/quantize_by_name/model.safetensors"))
    assert ours.keys() == named.keys()
    assert all(ours[each].float().equal(named[each].float()) for each in ours)
