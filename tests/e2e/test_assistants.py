"""An assistant in whole runs: it is planned, measured with the compressed model, and proposes for `generate`
and `validate`; and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_assistant import CLUSTERS, Pair, saved_pair
from tests.support.tiny_run import RECIPE

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
CALIBRATE, _, EXPORT, VALIDATE = RECIPE["stages"]
QUANTIZE = {**RECIPE["stages"][1], "scheme": "W4A16_G32"}
SERVED = {"batch_sizes": [1, 2], "num_prompts": 2, "prompt_tokens": 8, "output_tokens": 16, "k": 2}
WIDTHS = {"head_dim": 32, "global_head_dim": 64, "hidden_size": 64, "intermediate_size": 64}


@pytest.fixture(scope="module")
def pair(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tiny model with the tokenizer of the tiny model, and its assistant."""
    vocab_size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    of_target = {**WIDTHS, "vocab_size": vocab_size, "vocab_size_per_layer_input": vocab_size}
    clusters = {**CLUSTERS, "num_centroids": next(each for each in (8, 7, 5, 3, 1) if vocab_size % each == 0)}
    clusters["centroid_intermediate_top_k"] = 1
    found = saved_pair(tmp_path_factory.mktemp("pair"), of_target=of_target, **clusters)
    shutil.copyfile(model_dir / "tokenizer.json", found.target_path / "tokenizer.json")
    return found


@pytest.mark.slow
def test_an_assistant_is_planned_measured_and_proposes(
    recipe: Recipe, command: Command, work: Path, pair: Pair
) -> None:
    own: dict[str, Any] = {**SERVED, "assistant": str(pair.assistant_path)}
    served = {**VALIDATE, "speculative": own, "gates": {"acceptance_length": 1.0}}
    path = recipe(model=str(pair.target_path), stages=[CALIBRATE, QUANTIZE, EXPORT, served])
    code, out, err = command("plan", path)
    assert code == 0, err
    assert "with a draft of" in out
    code, _, err = command("run", path, "--run-dir", "run")
    assert code == 0, err
    report = json.loads((work / "run" / "evidence" / "report.json").read_text())
    assert [row["proposer"] for row in report["speculation"]["speed"]] == ["assistant"] * 4 + ["ngram"] * 4
    assert report["speculation"]["num_equal"] == report["speculation"]["num_compared"] == 16
    exported = work / "run" / "artifacts" / "export"
    assert not (exported / "draft").exists()
    ask = ("one two", "--max-tokens", 8)
    code, plain, err = command("generate", exported, *ask)
    assert code == 0, err
    code, speculated, err = command("generate", exported, *ask, "--speculative", pair.assistant_path)
    assert code == 0, err
    assert speculated == plain != ""
    small = ("--against", pair.target_path, "--num-samples", 2, "--seq-len", 32, "--no-latency")
    code, _, err = command(
        "validate", exported, *small, "--assistant", pair.assistant_path, "--no-speculative", "--out", "no"
    )
    assert code == 2
    assert "--no-speculative measures no proposals" in err


def test_an_assistant_of_another_model_is_refused_by_plan_and_generate(
    recipe: Recipe, command: Command, model_dir: Path, pair: Pair
) -> None:
    served = {**VALIDATE, "speculative": {**SERVED, "assistant": str(pair.assistant_path)}}
    path = recipe(model=str(model_dir), stages=[CALIBRATE, QUANTIZE, EXPORT, served])
    code, _, err = command("plan", path)
    assert code == 2
    assert "the assistant was made for a model of" in err
    code, _, err = command("generate", model_dir, "one", "--speculative", pair.assistant_path)
    assert code == 2
    assert "the assistant was made for a model of" in err
