"""The distil stage in whole runs: behind prune and before quantize, killed and resumed, by two ranks, with
kept logits, LoRA, a student of its own shape, text that the teacher writes; and what it refuses.
"""

import itertools
import json
import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.artifact.manifest import open_artifact
from compress.data.tokens import load_token_set
from compress.distill import train
from compress.export import open_weights
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.weights import MemorySource, build_decoder
from tests.e2e.test_ranks import launch
from tests.support.processes import run_alone
from tests.support.slow import slow
from tests.support.tiny_model import write_tiny_model
from tests.support.tiny_run import RECIPE

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
CALIBRATE = RECIPE["stages"][0]
PRUNE = {"kind": "prune", "ffn": {"keep": 0.5}, "multiple": 32}
DISTILL: dict[str, Any] = {
    "kind": "distill",
    "tokens": 1536,
    "seq_len": 32,
    "batch_size": 4,
    "micro_batch_size": 2,
    "lr": 1e-3,
    "eval_samples": 4,
    "eval_every": 3,
    "compute_dtype": "float32",
}


@pytest.fixture(scope="module")
def model_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with louder weights: as it is, its distributions are so flat that there is nothing to
    lose by pruning.
    """
    path = tmp_path_factory.mktemp("loud")
    decoder = build_decoder(open_weights(model_dir), dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(6.0 if parameter.dim() == 2 else 1.0)
    write_checkpoint(path, MemorySource(decoder, dtype=torch.bfloat16))
    shutil.copyfile(model_dir / "tokenizer.json", path / "tokenizer.json")
    return path


def stages(*, quantize: bool = False, **changes: Any) -> list[dict[str, Any]]:
    return [CALIBRATE, PRUNE, {**DISTILL, **changes}, *(RECIPE["stages"][1:] if quantize else [])]


def facts(command: Command, path: Path, workspace: str = "alone") -> dict[str, Any]:
    code, _, err = command("run", path, "--workspace", workspace, "--json")
    assert code == 0, err
    return distillation(Path(workspace))


def distillation(workspace: Path) -> dict[str, Any]:
    (found,) = [
        open_artifact(path.parent)
        for path in workspace.glob("store/*/tokens.safetensors")
        if (path.parent / "outer.safetensors").exists()
    ]
    result: dict[str, Any] = found.manifest.facts["distillation"]
    return result


def artifact(workspace: Path) -> Path:
    (found,) = [
        path.parent
        for path in workspace.glob("store/*/tokens.safetensors")
        if (path.parent / "outer.safetensors").exists()
    ]
    return found


@pytest.mark.slow
def test_a_pruned_model_learns_and_is_judged_against_the_source(
    recipe: Recipe, command: Command, work: Path
) -> None:
    path = recipe(stages=stages(quantize=True, passes=2, tokens=6144))
    code, out, err = command("run", path, "--workspace", "whole", "--json")
    assert code == 0, err
    document = json.loads(out)
    found = distillation(work / "whole")
    assert found["after"]["kl"] < 0.9 * found["before"]["kl"]
    assert found["curve"][0]["tokens"] == 0
    assert found["tokens"] == 6144 == found["curve"][-1]["tokens"]
    assert not found["stopped_early"]
    weights = open_weights(artifact(work / "whole"))
    assert {layer.intermediate_size for layer in weights.arch.layers} == {128}
    report = json.loads(next((work / "whole").glob("store/*/report.json")).read_text())
    assert report["pruning"]["after"]["ffn"] == 128
    assert report["distillation"]["after"] == found["after"]
    assert report["artifact"]["source_digest"] != report["artifact"]["digest"]
    assert "of the evaluation text occur in the training text" in report["calibration"]["training_overlap"]
    page = next((work / "whole").glob("store/*/report.html")).read_text()
    assert "What training brought back" in page
    assert document["artifact"]["digest"]


KILLED = """
import os, signal, sys
import compress.distill.learn as learn
from compress.cli.app import main
save, saves, learn.TIMES_OF_A_SAVE = learn._save, [], 0.0
def kills(*args):
    save(*args)
    saves.append(args)
    if len(saves) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
learn._save = kills
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "changes",
    [
        slow({}),
        {"optimizer": "muon", "loss": {"kind": "js", "top_k": 8}},
        slow({"lora": {"rank": 4}, "recompute": True}),
    ],
)
@pytest.mark.slow
def test_killed_and_resumed_the_curve_and_the_weights_have_the_same_bits(
    recipe: Recipe, command: Command, work: Path, changes: dict[str, Any]
) -> None:
    path = recipe(stages=stages(**changes))
    undisturbed = facts(command, path)
    killed = run_alone("run", path, "--workspace", "killed", code=KILLED)
    assert killed.returncode == -signal.SIGKILL
    assert list((work / "killed").glob("scratch/*/state.safetensors"))
    assert not list((work / "killed").glob("store/*/tokens.safetensors/../outer.safetensors"))
    resumed = facts(command, path, "killed")
    assert resumed["curve"] == undisturbed["curve"]
    assert len(undisturbed["curve"]) > 8
    digests = [
        {each.path: each.digest for each in open_artifact(artifact(work / name)).manifest.files}
        for name in ("alone", "killed")
    ]
    assert digests[0] == digests[1]


STOPPED = KILLED.replace("SIGKILL", "SIGTERM").replace("len(saves) == 2", "len(saves) == 1")


@pytest.mark.slow
def test_asked_to_stop_it_stores_its_state_and_goes_on(recipe: Recipe, command: Command, work: Path) -> None:
    path = recipe(stages=stages())
    stopped = run_alone("run", path, "--workspace", "stopped", code=STOPPED)
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    assert "resumes here" in stopped.stderr
    assert facts(command, path, "stopped")["curve"] == facts(command, path)["curve"]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"loss": {"top_k": 16}, "eval_samples": 1, "optimizer": "muon"}])
def test_two_ranks_follow_the_curve_of_one(
    recipe: Recipe, command: Command, work: Path, changes: dict[str, Any]
) -> None:
    path = recipe(stages=stages(**changes))
    alone = facts(command, path)
    results = launch(2, "run", path, "--workspace", "many", "--json")
    assert [each.returncode for each in results] == [0, 0], results[0].stderr
    many = distillation(work / "many")
    assert len(many["curve"]) == len(alone["curve"])
    for one, other in zip(alone["curve"], many["curve"], strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert other[key] == pytest.approx(one[key], rel=2e-4), key


@pytest.mark.slow
def test_kept_logits_serve_several_runs(recipe: Recipe, command: Command, work: Path) -> None:
    """All but the whole vocabulary kept is nearly the teacher; a second run with another rate asks nobody."""
    first = recipe(stages=stages(loss={"top_k": 300}))
    kept = facts(command, first)
    full = facts(command, recipe(stages=stages()), "full")
    assert kept["after"]["kl"] == pytest.approx(full["after"]["kl"], rel=0.02)
    shards = {path: path.stat().st_mtime_ns for path in (work / "alone").glob("kept/teacher-*/*.safetensors")}
    assert shards
    command("run", recipe(stages=stages(loss={"top_k": 300}, lr=5e-4)), "--workspace", "alone")
    assert {
        path: path.stat().st_mtime_ns for path in (work / "alone").glob("kept/teacher-*/*.safetensors")
    } == shards


@pytest.mark.parametrize("init", ["teacher", "random"])
@pytest.mark.one_in(3)
def test_a_student_of_its_own_shape(recipe: Recipe, command: Command, work: Path, init: str) -> None:
    """Exported and validated as it is, without a quantization."""
    student = {"layers": 2, "hidden": 64, "ffn": 64, "heads": 2, "kv_heads": 1, "init": init}
    path = recipe(
        stages=[
            {**DISTILL, "student": student, "teacher_device": "cpu"},
            RECIPE["stages"][-1] | {"gates": {}},
        ]
    )
    found = facts(command, path)
    arch = open_weights(artifact(work / "alone")).arch
    assert (arch.num_layers, arch.hidden_size, arch.layers[0].num_heads, arch.layers[0].num_kv_heads) == (
        2,
        64,
        2,
        1,
    )
    assert found["student"]["params"] == arch.num_params
    assert math.isfinite(found["after"]["kl"])
    report = json.loads(next((work / "alone").glob("store/*/report.json")).read_text())
    assert sum(row["candidate_bytes"] for row in report["artifact"]["sizes"]) == 2 * arch.num_params


@pytest.mark.slow
def test_text_that_the_teacher_writes(recipe: Recipe, command: Command, work: Path) -> None:
    found = facts(command, recipe(stages=stages(sample={"prompt_tokens": 8, "temperature": 1.0})))
    assert found["sampled"]
    written = load_token_set(artifact(work / "alone") / "tokens.safetensors").tokens_NS
    plain = facts(command, recipe(stages=stages()), "plain")
    read = load_token_set(artifact(work / "plain") / "tokens.safetensors").tokens_NS
    assert torch.equal(written[:, :8], read[:, :8])
    assert not torch.equal(written[:, 8:], read[:, 8:])
    assert plain["data"]["digest"] != found["data"]["digest"]


@pytest.mark.slow
def test_a_quantized_artifact_teaches(recipe: Recipe, command: Command, work: Path) -> None:
    code, _, err = command("run", recipe(stages=[CALIBRATE, RECIPE["stages"][1]]), "--workspace", "teacher")
    assert code == 0, err
    (teacher,) = [path.parent for path in (work / "teacher").glob("store/*/outer.safetensors")]
    found = facts(command, recipe(stages=stages(teacher=str(teacher))))
    assert found["teacher"]["name"] == teacher.name
    assert found["after"]["kl"] < found["before"]["kl"]


def test_a_plateau_ends_it(recipe: Recipe, command: Command, work: Path) -> None:
    found = facts(command, recipe(stages=stages(early_stop=1, lr=1e-9)))
    assert found["stopped_early"]
    assert found["num_steps"] == 3


def test_a_rank_that_a_checkpoint_of_the_student_cannot_have_is_refused(
    recipe: Recipe, command: Command, tmp_path_factory: pytest.TempPathFactory
) -> None:
    small = write_tiny_model(tmp_path_factory.mktemp("small"), num_key_value_heads=1)
    student = {"checkpoint": str(small)}
    code, _, err = command("run", recipe(stages=stages(student=student, lora={"rank": 33})))
    assert code == 2
    assert "lora.rank 33 is more than 32, the smaller side of layers.0.attn.k (32 x 128)" in err


REFUSALS = [
    ([DISTILL], "its own teacher"),
    ([{**DISTILL, "student": {"layers": 9}}], "between 1 and the teacher's 3"),
    ([{**DISTILL, "student": {"heads": 3, "kv_heads": 2}}], "3 query heads on 2 KV heads"),
    ([{**DISTILL, "student": {}}], "name what is smaller"),
    ([{**DISTILL, "tokens": 64}], "fewer than a batch"),
    ([{**DISTILL, "student": {"layers": 2}, "teacher": "hf://some/model"}], "Name the commit"),
    (
        [{**DISTILL, "student": {"hidden": 64, "heads": 2, "kv_heads": 1}, "lora": {"rank": 33}}],
        "distill: lora.rank 33 is more than 32, the smaller side of layers.0.attn.k (32 x 64)",
    ),
    ([CALIBRATE, PRUNE, {**DISTILL, "seq_len": 256, "tokens": 4096}], "has 128 positions"),
    (
        [CALIBRATE, PRUNE, {**DISTILL, "data": "builtin://python-eval"}, *RECIPE["stages"][1:]],
        "judges on the same text",
    ),
]


@pytest.mark.parametrize(("refused", "sentence"), REFUSALS)
def test_what_cannot_work_is_refused_before_any_work(
    recipe: Recipe, command: Command, refused: list[dict[str, Any]], sentence: str
) -> None:
    code, _, err = command("run", recipe(stages=refused))
    assert code == 2
    assert sentence in err


def test_a_loss_that_is_not_finite_keeps_the_state_before_it(
    recipe: Recipe, command: Command, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What learning rate diverges depends on the CPU: here the fifth loss is none."""
    window = train._Window
    add = window.add
    losses = itertools.count(1)

    def diverging(self: Any, loss: torch.Tensor) -> None:
        add(self, loss * (float("nan") if next(losses) >= 5 else 1.0))

    monkeypatch.setattr(window, "add", diverging)
    code, _, err = command("run", recipe(stages=stages(eval_every=1)), "--workspace", "nan")
    assert code == 2
    assert "Lower the learning rate" in err
    assert list((work / "nan").glob("scratch/*/state.safetensors"))
