"""Mixtures of experts in whole runs: pruned, distilled, quantized, exported and validated, twice; by several
ranks; killed and resumed.
"""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.artifact.manifest import open_artifact
from compress.export import open_checkpoint
from compress.models.checkpoint import Checkpoint
from compress.quant.scheme import QuantizedWeight
from tests.e2e.test_distill import DISTILL
from tests.e2e.test_ranks import METHODS, alone, digest, launch
from tests.e2e.test_run import KILLED_AT
from tests.support.processes import run_alone
from tests.support.slow import slow
from tests.support.tiny_moe import ON_LATENTS, write_tiny_moe
from tests.support.tiny_run import NUM_LAYERS, RECIPE

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
CALIBRATE, _, EXPORT, VALIDATE = RECIPE["stages"]


@pytest.fixture(scope="module")
def model_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_moe(tmp_path_factory.mktemp("moe"), model_dir)


def quantizing(method: str, **changes: Any) -> list[dict[str, Any]]:
    return [{**CALIBRATE, "num_samples": 9}, {"kind": "quantize", **METHODS[method], **changes}]


@pytest.mark.parametrize(
    ("size", "method"), [(2, "balanced"), (2, "at once"), slow(3, "awq"), slow(2, "smoothquant")]
)
@pytest.mark.slow
def test_ranks_give_the_artifact_of_one_rank(
    size: int, method: str, recipe: Recipe, command: Command
) -> None:
    path = recipe(stages=quantizing(method, experts={"min_tokens": 200}))
    results = launch(size, "run", path, "--workspace", "many", "--json")
    assert digest(results[0]) == alone(command, path)


@pytest.mark.parametrize("method", ["balanced", slow("at once")])
@pytest.mark.slow
def test_killed_at_any_layer_it_resumes_there_and_ends_with_the_same_digest(
    method: str, recipe: Recipe, command: Command
) -> None:
    path = recipe(stages=quantizing(method))
    expected = alone(command, path)
    for layer in range(NUM_LAYERS - 1):
        workspace = f"killed-{layer}"
        killed = run_alone(layer, "run", path, "--workspace", workspace, code=KILLED_AT)
        assert killed.returncode == -signal.SIGKILL
        assert len(list(Path(workspace).glob("scratch/*/layer-*.safetensors"))) == layer + 1
        code, out, err = command("run", path, "--workspace", workspace, "--json")
        assert code == 0, err
        assert json.loads(out)["artifact"]["digest"] == expected


def test_pruned_distilled_quantized_exported_and_validated_twice(
    recipe: Recipe, command: Command, work: Path
) -> None:
    path = recipe(
        stages=[
            CALIBRATE,
            {"kind": "prune", "experts": {"keep": 3}},
            {**DISTILL, "lr": 1e-4},
            {
                "kind": "quantize",
                "round": {"kind": "gptq"},
                "experts": {"min_tokens": 300, "starved": "keep"},
            },
            EXPORT,
            {**VALIDATE, "gates": {"size_ratio": 0.9}},
        ]
    )
    digests = []
    for name in ("one", "other"):
        code, out, err = command("run", path, "--workspace", f"{name}-ws", "--run-dir", work / name, "--json")
        assert code == 0, err
        digests.append([stage.get("digest") for stage in json.loads(out)["stages"]][:-1])
        digests[-1].append(json.loads(out)["artifact"]["digest"])
    assert digests[0] == digests[1]
    arch = open_checkpoint(open_artifact(work / "one" / "artifacts" / "export").path).arch
    assert [layer.experts and layer.experts.num_experts for layer in arch.layers] == [None, 3, 3]
    report = json.loads((work / "one" / "evidence" / "report.json").read_text())
    assert [row["num_experts"] for row in report["experts"]["layers"]] == [3, 3]
    assert report["experts"]["policy"] == "keep"
    assert report["pruning"]["after"]["experts"] == 3
    kls = [row["kl"] for row in report["distillation"]["curve"] if "kl" in row]
    assert kls[-1] < kls[0]
    assert "Calibration tokens of the experts" in (work / "one" / "evidence" / "report.html").read_text()
    card = (work / "one" / "evidence" / "README.md").read_text()
    assert "3 of 4 experts" in card
    assert "| layer | experts | fewest |" in card


def test_experts_that_act_on_latents_are_pruned_quantized_exported_and_validated(
    recipe: Recipe, command: Command, model_dir: Path, work: Path
) -> None:
    model = write_tiny_moe(work / "latents", model_dir, config=ON_LATENTS)
    path = recipe(
        model=str(model),
        stages=[
            CALIBRATE,
            {"kind": "prune", "experts": {"keep": 3}},
            {"kind": "quantize", **METHODS["balanced"], "experts": {"min_tokens": 300}},
            EXPORT,
            {**VALIDATE, "gates": {"size_ratio": 0.9, "ppl_ratio": 2.0}},
        ],
    )
    code, _, err = command("run", path, "--run-dir", work / "run", "--json")
    assert code == 0, err
    exported = open_checkpoint(open_artifact(work / "run" / "artifacts" / "export").path)
    assert [layer.experts and layer.experts.num_experts for layer in exported.arch.layers] == [
        None,
        3,
        None,
        None,
        3,
    ]
    assert {each.latent_size for each in (layer.experts for layer in exported.arch.layers) if each} == {128}
    layer, before = exported.layer(4), Checkpoint(model).layer(4)
    for name in ("moe.latent_in.weight", "moe.latent_out.weight"):
        assert torch.equal(torch.as_tensor(layer[name]), torch.as_tensor(before[name]))
    assert isinstance(layer["moe.experts.2.up.weight"], QuantizedWeight)


def test_experts_without_a_token_are_named(
    recipe: Recipe, command: Command, model_dir: Path, work: Path
) -> None:
    blind = write_tiny_moe(work / "blind", model_dir, blind=True)
    path = recipe(model=str(blind), stages=[CALIBRATE, {"kind": "quantize", "round": {"kind": "gptq"}}])
    code, _, err = command("run", path)
    assert code == 0, err
    assert "experts: fewest 0 tokens, 8 of 8 below 512 in 2 layers, policy shrink" in err
    assert "4 of 8 experts saw no calibration token (layer 1: 2, 3; layer 2: 2, 3)" in err
