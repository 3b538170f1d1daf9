"""The recover stage in whole runs: behind quantize and before export, killed and resumed, by two ranks; its
plan and what it refuses.
"""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.artifact.manifest import Artifact, open_artifact
from tests.e2e.test_distill import KILLED, model_dir  # noqa: F401
from tests.e2e.test_ranks import launch
from tests.support.processes import run_alone
from tests.support.slow import slow
from tests.support.tiny_run import RECIPE

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
CALIBRATE, _, EXPORT, VALIDATE = RECIPE["stages"]
QUANTIZE = {"kind": "quantize", "scheme": "W2A16_G64", "round": {"kind": "rtn", "scale": "mse"}}
RECOVER: dict[str, Any] = {
    "kind": "recover",
    "tokens": 1536,
    "seq_len": 32,
    "batch_size": 4,
    "micro_batch_size": 2,
    "lr": 0.1,
    "scale_lr": 0.01,
    "eval_samples": 4,
    "eval_every": 3,
    "compute_dtype": "float32",
}


def stages(**changes: Any) -> list[dict[str, Any]]:
    return [QUANTIZE, {**RECOVER, **changes}]


def recovered(workspace: Path) -> Artifact:
    """The one artifact of the workspace that has codes and training text."""
    found = [path.parent for path in workspace.glob("store/*/tokens.safetensors")]
    (place,) = [path for path in found if (path / "outer.safetensors").exists()]
    return open_artifact(place)


def facts(command: Command, path: Path, workspace: str = "alone") -> dict[str, Any]:
    code, _, err = command("run", path, "--workspace", workspace, "--json")
    assert code == 0, err
    result: dict[str, Any] = recovered(Path(workspace)).manifest.facts["recovery"]
    return result


def test_a_quantized_model_learns_and_is_exported_and_judged_like_any_other(
    recipe: Recipe, command: Command, work: Path
) -> None:
    path = recipe(stages=[*stages(passes=2, tokens=4096), EXPORT, {**VALIDATE, "gates": {}}])
    code, out, err = command("plan", path, "--json")
    assert code == 0, err
    assert "M codes learn from the source" in out
    code, out, err = command("run", path, "--workspace", "whole", "--json")
    assert code == 0, err
    artifact = recovered(work / "whole")
    found = artifact.manifest.facts["recovery"]
    assert found["kept"]
    assert found["after"]["kl"] < 0.9 * found["before"]["kl"]
    assert found["tokens"] == 4096 == found["curve"][-1]["tokens"]
    assert artifact.manifest.role == "quantized"
    assert artifact.manifest.scheme is not None
    assert artifact.manifest.scheme["name"] == "W2A16_G64"
    report = json.loads(next((work / "whole").glob("store/*/report.json")).read_text())
    assert report["artifact"]["scheme"] == "W2A16_G64"
    assert report["recovery"]["after"] == found["after"]
    assert "occur in the codes' training text" in report["calibration"]["recovery_overlap"]
    page = next((work / "whole").glob("store/*/report.html")).read_text()
    assert "What training of the codes brought back" in page


@pytest.mark.parametrize("changes", [{}, slow({"lora": {"rank": 4}, "recompute": True})])
@pytest.mark.slow
def test_killed_and_resumed_the_curve_and_the_codes_have_the_same_bits(
    recipe: Recipe, command: Command, work: Path, changes: dict[str, Any]
) -> None:
    path = recipe(stages=stages(**changes))
    undisturbed = facts(command, path)
    killed = run_alone("run", path, "--workspace", "killed", code=KILLED)
    assert killed.returncode == -signal.SIGKILL
    assert list((work / "killed").glob("scratch/*/state.safetensors"))
    assert facts(command, path, "killed")["curve"] == undisturbed["curve"]
    assert len(undisturbed["curve"]) > 8
    digests = [
        {each.path: each.digest for each in recovered(work / name).manifest.files}
        for name in ("alone", "killed")
    ]
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_the_digest_does_not_depend_on_how_the_model_is_spelled(
    recipe: Recipe,
    command: Command,
    work: Path,
    model_dir: Path,  # noqa: F811
) -> None:
    (work / "here").symlink_to(model_dir.parent, target_is_directory=True)
    spelled = {
        "absolute": str(model_dir),
        "relative": f"./here/{model_dir.name}",
    }  # the lock spells it absolutely
    for name, model in spelled.items():
        facts(command, recipe(model=model, stages=stages(tokens=256)), name)
    assert recovered(work / "absolute").digest == recovered(work / "relative").digest


@pytest.mark.slow
def test_two_ranks_follow_the_curve_of_one(recipe: Recipe, command: Command, work: Path) -> None:
    path = recipe(stages=stages(eval_samples=1))
    alone = facts(command, path)
    results = launch(2, "run", path, "--workspace", "many", "--json")
    assert [each.returncode for each in results] == [0, 0], results[0].stderr
    many = recovered(work / "many").manifest.facts["recovery"]
    assert len(many["curve"]) == len(alone["curve"])
    for one, other in zip(alone["curve"], many["curve"], strict=True):
        assert other["loss" if "loss" in one else "kl"] == pytest.approx(
            one["loss" if "loss" in one else "kl"], rel=0.05
        ), "a code that flips on one side moves a little more than the rounding of sums"


REFUSALS = [
    ([RECOVER], "needs"),
    ([CALIBRATE, {"kind": "quantize", "scheme": "dense", "kv_cache": "fp8"}, RECOVER], "no codes to train"),
    ([QUANTIZE, EXPORT, RECOVER], "Put it right after quantize"),
    ([QUANTIZE, RECOVER, QUANTIZE], "a second 'quantize'"),
    (stages(tokens=64), "fewer than a batch"),
    (stages(seq_len=256, tokens=4096), "has 128 positions"),
    (stages(scale_lr=1.0, lr=1e-4), "more than 1,000 times"),
    (stages(lora={"rank": 65}), "recover: lora.rank 65 is more than 64, the smaller side of layers.0.attn.k"),
    ([*stages(data="builtin://python-eval"), EXPORT, VALIDATE], "judges on the same text"),
]


@pytest.mark.parametrize(("refused", "sentence"), REFUSALS)
def test_what_cannot_work_is_refused_before_any_work(
    recipe: Recipe, command: Command, refused: list[dict[str, Any]], sentence: str
) -> None:
    code, _, err = command("run", recipe(stages=refused))
    assert code == 2
    assert sentence in err
