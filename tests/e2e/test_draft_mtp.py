"""The MTP head of a model in whole runs: it is trained for the compressed model, goes back into the
checkpoint, and is served and judged; and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.artifact.manifest import open_artifact
from compress.export import codecs, open_checkpoint
from compress.export.draft import kind_of_draft, open_draft
from compress.models.mtp import mtp_of_draft
from compress.models.mtp_reader import read_mtp
from compress.runtime.speculative.mtp import Mtp
from tests.e2e.test_draft import DRAFT
from tests.golden.test_families import tensors_of
from tests.support.tiny_mtp import saved_with_mtp
from tests.support.tiny_run import RECIPE

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
CALIBRATE, _, EXPORT, VALIDATE = RECIPE["stages"]
QUANTIZE = {**RECIPE["stages"][1], "scheme": "W4A16_G32"}
HEAD: dict[str, Any] = {**DRAFT, "init": {"kind": "mtp", "steps": 2}}
SERVED = {"batch_sizes": [1, 2], "num_prompts": 2, "prompt_tokens": 8, "output_tokens": 16, "k": 2}
SIZES = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 64),
    **{"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"max_position_embeddings": 128},
}


SEVERAL: dict[str, tuple[str, dict[str, Any]]] = {
    "each reads the model": ("mimo_v2_flash", {"num_attention_heads": 4}),
    "a chain": ("glm4-moe", {}),
}
"""Cases with several heads, which read the model's hidden states, or those of the head before."""


@pytest.fixture(scope="module")
def models(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models with a head and with the tokenizer of the tiny model."""
    path = tmp_path_factory.mktemp("with_mtp")
    vocab_size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    own = {"qwen3_5_text": {"linear_value_head_dim": 32, "linear_num_value_heads": 4}}
    for case in ("glm4-moe", "qwen3_5_text"):
        saved_with_mtp(path / case, case, vocab_size=vocab_size, **SIZES, **own.get(case, {}))
    for name, (case, changes) in SEVERAL.items():
        saved_with_mtp(path / name, case, num_heads=2, vocab_size=vocab_size, **{**SIZES, **changes})
    models = {case: path / case for case in ("glm4-moe", "qwen3_5_text", *SEVERAL)}
    for each in models.values():
        shutil.copyfile(model_dir / "tokenizer.json", each / "tokenizer.json")
    return models


@pytest.mark.slow
@pytest.mark.parametrize("case", ["glm4-moe", "qwen3_5_text"])
def test_a_head_learns_goes_back_into_the_checkpoint_and_is_judged(
    case: str, recipe: Recipe, command: Command, work: Path, models: dict[str, Path]
) -> None:
    served = {**VALIDATE, "speculative": SERVED, "gates": {"acceptance_length": 1.0}}
    draft = {**HEAD, "tokens": 4096, "passes": 2}
    path = recipe(model=str(models[case]), stages=[CALIBRATE, QUANTIZE, draft, EXPORT, served])
    code, _, err = command("run", path, "--run-dir", "run")
    assert code == 0, err
    artifact = open_artifact(work / "run" / "artifacts" / "draft")
    facts = artifact.manifest.facts["draft"]
    assert facts["kind"] == kind_of_draft(artifact.path) == "mtp"
    assert facts["after"]["kl"] < facts["before"]["kl"]
    assert facts["after"]["acceptance_length"] > facts["before"]["acceptance_length"] > 1
    proposer = open_draft(artifact.path)
    assert isinstance(proposer, Mtp)
    trained = mtp_of_draft(artifact)
    exported = work / "run" / "artifacts" / "export"
    assert not (exported / "draft").exists()
    read = read_mtp(open_checkpoint(exported), codecs())
    assert read.weights.keys() == trained.weights.keys() == proposer.head.weights.keys()
    for name, each in trained.weights.items():
        found = read.weights[name]
        assert isinstance(each, Tensor)
        assert isinstance(found, Tensor)
        assert torch.equal(each, found) or name == "target_norm.weight", name
    before, after = tensors_of(models[case]), tensors_of(exported)
    assert {name for name in before if "layers.3." in name or name.startswith("mtp.")} <= {*after}
    report = json.loads((work / "run" / "evidence" / "report.json").read_text())
    assert [row["proposer"] for row in report["speculation"]["speed"]] == ["mtp"] * 4 + ["ngram"] * 4
    assert report["speculation"]["num_equal"] == report["speculation"]["num_compared"] == 16
    card = (work / "run" / "evidence" / "README.md").read_text()
    assert """--speculative-config '{"num_speculative_tokens": 2, "method": "mtp"}'""" in card


@pytest.mark.slow
def test_a_head_that_no_stage_touched_is_served_from_the_export(
    recipe: Recipe, command: Command, work: Path, models: dict[str, Path]
) -> None:
    path = recipe(model=str(models["glm4-moe"]), stages=[CALIBRATE, QUANTIZE, EXPORT])
    assert command("run", path, "--run-dir", "run")[0] == 0
    exported = work / "run" / "artifacts" / "export"
    ask = ("one two", "--max-tokens", 8)
    code, plain, err = command("generate", exported, *ask)
    assert code == 0, err
    code, speculated, err = command("generate", exported, *ask, "--speculative", "mtp")
    assert code == 0, err
    assert speculated == plain != ""


REFUSALS = [
    ("glm4-moe", {"init": {"kind": "mtp", "steps": 8}}, "less than or equal to 7"),
    ("glm4-moe", {"loss": {"top_k": 8}}, "leave out loss.top_k"),
    ("glm4-moe", {"quantize": {"scheme": "W4A16_G32"}}, "an MTP head stays in 16 bits"),
    ("each reads the model", {}, "set init.steps to 1"),
    ("a chain", {}, "each of which reads the one before"),
    (None, {}, "models are read without a layer that predicts a further token"),
]


@pytest.mark.parametrize(("case", "changes", "sentence"), REFUSALS)
def test_what_cannot_work_is_refused_before_any_work(
    case: str | None,
    changes: dict[str, Any],
    sentence: str,
    recipe: Recipe,
    command: Command,
    work: Path,
    models: dict[str, Path],
) -> None:
    model = {} if case is None else {"model": str(models[case])}
    code, _, err = command("run", recipe(**model, stages=[CALIBRATE, QUANTIZE, {**HEAD, **changes}]))
    assert code == 2
    assert sentence in err
    assert not list(work.glob("**/store/*"))
