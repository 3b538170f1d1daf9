"""A whole run of a model whose activation has parameters: pruned, distilled, quantized, recovered, exported
and validated.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compress.artifact.manifest import open_artifact
from compress.export import open_checkpoint
from compress.models.weights import dense
from compress.models.xielu import BETA, LEARNED, initial_parameters
from tests.e2e.test_distill import DISTILL
from tests.e2e.test_recover import RECOVER
from tests.support.tiny_model import write_tiny_model
from tests.support.tiny_run import NUM_LAYERS, RECIPE

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
CALIBRATE, _, EXPORT, VALIDATE = RECIPE["stages"]
QUANTIZE = {
    "kind": "quantize",
    "scheme": "W4A16_G32",
    "smooth": {"kind": "awq", "num_ratios": 4},
    "round": {"kind": "gptq"},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    facts = {"model_type": "apertus", "architectures": ["ApertusForCausalLM"], "hidden_act": "xielu"}
    return write_tiny_model(tmp_path_factory.mktemp("apertus"), **facts)


@pytest.mark.slow
def test_pruned_distilled_quantized_recovered_exported_and_validated(
    recipe: Recipe, command: Command, work: Path
) -> None:
    stages = [
        CALIBRATE,
        {"kind": "prune", "ffn": {"keep": 0.5}},
        DISTILL,
        QUANTIZE,
        RECOVER,
        EXPORT,
        VALIDATE,
    ]
    path = recipe(stages=stages)
    code, _, err = command("plan", path, "--json")
    assert code == 0, err
    code, _, err = command("run", path, "--run-dir", work / "run", "--json")
    assert code == 0, err
    source = open_checkpoint(open_artifact(work / "run" / "artifacts" / "export").path)
    assert (source.arch.family, source.arch.activation) == ("apertus", "xielu")
    first = initial_parameters()
    for idx in range(NUM_LAYERS):
        weights = source.layer(idx)
        assert source.arch.layers[idx].intermediate_size == 128
        assert float(dense(weights["ffn.beta"])) == BETA
        for name in LEARNED:
            assert not torch.equal(
                dense(weights[f"ffn.{name}"]).float(), first[name].to(torch.bfloat16).float()
            )
    report = json.loads((work / "run" / "evidence" / "report.json").read_text())
    assert report["recovery"]["trained"] == "Codes, scales, norms and activations"
