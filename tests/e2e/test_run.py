"""The main job, as a user and a cron line meet it."""

import json
import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.artifact.manifest import open_artifact, verify_artifact
from compress.artifact.workspace import Workspace
from tests.support.processes import run_alone
from tests.support.tiny_run import NUM_LAYERS, RECIPE

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
PUSH = {"to": "layout://registry", "name": "tiny-w4", "aliases": ["candidate"]}


def run_json(command: Command, *argv: object) -> tuple[int, dict[str, Any]]:
    code, out, err = command("run", *argv, "--json")
    assert code in (0, 3), err
    return code, json.loads(out)


def test_a_run_gives_artifact_report_and_tags_and_a_second_run_finds_everything_cached(
    recipe: Recipe, command: Command, work: Path
) -> None:
    path = recipe(push=PUSH)
    _, first = run_json(command, path)
    assert first["status"] == "done"
    assert [stage["cached"] for stage in first["stages"]] == [False] * 4
    assert first["pushed"]["tags"] == ["latest", "candidate"]
    artifact = open_artifact(Path(first["artifact"]["path"]))
    verify_artifact(artifact)
    assert artifact.digest == first["artifact"]["digest"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        record.path for record in artifact.manifest.files
    }
    evidence = Path(first["report"]).parent
    report = json.loads((evidence / "report.json").read_text())
    assert report["artifact"]["digest"] == artifact.digest
    assert len(report["layers"]) == 7 * NUM_LAYERS
    assert json.loads((evidence / "provenance.json").read_text())["artifacts"]["export"] == artifact.digest

    _, second = run_json(command, path)
    assert [stage["cached"] for stage in second["stages"]] == [True] * 4
    assert second["artifact"] == first["artifact"]


@pytest.mark.slow
def test_rounding_without_activations_reads_no_calibration_text(
    recipe: Recipe, command: Command, work: Path
) -> None:
    calibrate, _, export, validate = RECIPE["stages"]
    quantize = {"kind": "quantize", "scheme": "FP8_DYNAMIC", "round": {"kind": "rtn"}}
    plain = recipe(stages=[quantize, export, validate])
    code, out, err = command("plan", plain, "--json")
    assert code == 0, err
    planned = json.loads(out)
    assert [row["kind"] for row in planned["stages"]] == ["quantize", "export", "validate"]
    assert planned["assumed_bytes_per_s"] > 0
    _, document = run_json(command, plain)
    evidence = Path(document["report"]).parent
    report = json.loads((evidence / "report.json").read_text())
    assert report["data_free"] is True
    assert "layers" not in report
    assert "measure_error: true" in (evidence / "report.html").read_text()
    card = (evidence / "README.md").read_text()
    assert "per-layer errors" not in card

    # text that the recipe names and no stage reads decides nothing and is not stated
    named = recipe(stages=[{**calibrate, "num_samples": 5}, quantize, export, validate])
    _, again = run_json(command, named)
    assert [stage["cached"] for stage in again["stages"]][:3] == [False, True, True]
    assert again["artifact"] == document["artifact"]
    report = json.loads(Path(again["report"]).with_name("report.json").read_text())
    assert report["calibration"].keys() == {"evaluation_data", "evaluation_digest"}

    measured = recipe(stages=[calibrate, {**quantize, "measure_error": True}, export, validate])
    _, observed = run_json(command, measured)
    report = json.loads(Path(observed["report"]).with_name("report.json").read_text())
    assert len(report["layers"]) == 7 * NUM_LAYERS
    assert "data_free" not in report
    assert "digest" in report["calibration"]


def test_fresh_workspaces_give_the_same_digest(recipe: Recipe, command: Command) -> None:
    path = recipe()
    digests = {
        run_json(command, path, "--workspace", name, "--until", "export")[1]["artifact"]["digest"]
        for name in ("a", "b")
    }
    assert len(digests) == 1


def test_another_seed_gives_another_artifact(recipe: Recipe, command: Command) -> None:
    digests = {
        run_json(command, recipe(seed=seed), "--until", "export")[1]["artifact"]["digest"] for seed in (3, 4)
    }
    assert len(digests) == 2


def test_the_lock_is_a_recipe_that_finds_everything_cached(recipe: Recipe, command: Command) -> None:
    _, first = run_json(command, recipe())
    code, out, err = command("resume", Path(first["report"]).parent.parent, "--json")
    assert code == 0, err
    resumed = json.loads(out)
    assert all(stage["cached"] for stage in resumed["stages"])
    assert resumed["artifact"] == first["artifact"]


@pytest.mark.slow
def test_if_changed_does_nothing_after_a_run_and_works_after_a_change(
    recipe: Recipe, command: Command, work: Path
) -> None:
    path = recipe(push=PUSH)
    run_json(command, path)
    before = sorted(
        (each, each.stat().st_mtime_ns) for each in (work / "registry").rglob("*") if each.name != ".lock"
    )
    code, document = run_json(command, path, "--if-changed")
    assert (code, document["status"]) == (0, "unchanged")
    assert (
        sorted(
            (each, each.stat().st_mtime_ns) for each in (work / "registry").rglob("*") if each.name != ".lock"
        )
        == before
    )
    assert command("run", path, "--if-changed", "--unchanged-exit-code", 9)[0] == 9
    code, document = run_json(command, recipe(push={**PUSH, "aliases": ["release"]}), "--if-changed")
    assert (code, document["status"], document["pushed"]["tags"]) == (0, "done", ["latest", "release"])


@pytest.mark.slow
def test_from_builds_again_and_gives_the_same_artifact(recipe: Recipe, command: Command) -> None:
    path = recipe()
    _, first = run_json(command, path)
    _, again = run_json(command, path, "--from", "quantize")
    assert [stage["cached"] for stage in again["stages"]] == [True, False, False, False]
    assert again["artifact"] == first["artifact"]


def test_a_failed_gate_keeps_the_artifact_and_does_not_push(
    recipe: Recipe, command: Command, work: Path
) -> None:
    strict = [*RECIPE["stages"][:3], {**RECIPE["stages"][3], "gates": {"kl_mean": 1e-9}}]
    path = recipe(stages=strict, push=PUSH)
    for flags in ((), ("--if-changed",)):
        code, document = run_json(command, path, *flags)
        assert (code, document["status"], document["pushed"]) == (3, "gate_failed", None)
        assert Path(document["artifact"]["path"]).is_dir()
        assert document["gates"][0]["passed"] is False
    assert not (work / "registry").exists()


def test_killed_at_any_layer_it_resumes_there_and_ends_with_the_same_digest(
    recipe: Recipe, command: Command, work: Path
) -> None:
    path = recipe()
    expected = run_json(command, path, "--workspace", "undisturbed", "--until", "export")[1]["artifact"][
        "digest"
    ]
    for layer in range(NUM_LAYERS):
        workspace = f"killed-{layer}"
        killed = run_alone(layer, "run", path, "--workspace", workspace, code=KILLED_AT)
        assert killed.returncode == -signal.SIGKILL
        assert len(list(Path(workspace).glob("scratch/*/layer-*.safetensors"))) == layer + 1
        _, document = run_json(command, path, "--workspace", workspace, "--until", "export")
        assert document["artifact"]["digest"] == expected


KILLED_AT = """
import os, signal, sys
import compress.calibrate.sequential as sequential
from compress.cli.app import main
store, layer = sequential.store_layer, int(sys.argv[1])
def stored(out, idx, *rest):
    store(out, idx, *rest)
    if idx == layer:
        os.kill(os.getpid(), signal.SIGKILL)
sequential.store_layer = stored
main(sys.argv[2:])
"""


def test_sigterm_ends_at_the_next_layer_with_143_and_the_same_command_resumes(
    recipe: Recipe, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    import compress.calibrate.sequential as sequential

    path = recipe()
    store = sequential.store_layer

    def asked_to_stop(out: Path, idx: int, *args: Any) -> None:
        store(out, idx, *args)
        if idx == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sequential, "store_layer", asked_to_stop)
    code, _, err = command("run", path)
    assert code == 143
    assert "resumes" in err
    assert len(list(Path(".compress").glob("scratch/*/layer-*.safetensors"))) == 1
    monkeypatch.undo()
    monkeypatch.chdir(path.parent)
    code, document = run_json(command, path)
    assert (code, document["status"]) == (0, "done")


def test_of_two_runs_at_once_one_exits_75(recipe: Recipe, command: Command) -> None:
    path = recipe()
    with Workspace(Path(".compress")).lock():
        code, out, err = command("run", path)
    assert (code, out) == (75, "")
    assert "in use by process" in err


def test_what_the_model_cannot_hold_is_refused_before_any_work(
    recipe: Recipe, command: Command, work: Path
) -> None:
    long = [*RECIPE["stages"][:3], {**RECIPE["stages"][3], "seq_len": 4096}]
    code, _, err = command("run", recipe(stages=long))
    assert code == 2
    assert "4096" in err
    assert "128" in err
    assert not (work / ".compress" / "store").exists()


@pytest.mark.parametrize(
    ("push", "words"),
    [
        ({"to": "s4://bucket", "name": "a"}, "unknown registry 's4'"),
        ({"to": "layout://registry", "name": "a b"}, "'a b'"),
        ({"to": "layout://registry", "name": "a", "aliases": ["x y"]}, "'x y'"),
    ],
)
def test_a_push_that_cannot_work_is_refused_before_any_work(
    recipe: Recipe, command: Command, work: Path, push: dict[str, Any], words: str
) -> None:
    code, _, err = command("run", recipe(push=push))
    assert code == 2
    assert words in err
    assert not (work / ".compress").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ("--until", "expotr"),
        ("--until", "quantize", "--from", "export"),
        ("--if-changed", "--from", "export"),
        ("--if-changed", "--until", "export"),
    ],
)
def test_flags_that_contradict_each_other_or_the_recipe_are_refused_before_any_work(
    recipe: Recipe, command: Command, work: Path, flags: tuple[str, ...]
) -> None:
    code, _, err = command("run", recipe(), *flags)
    assert code == 2
    assert flags[0] in err
    assert not (work / ".compress").exists()


def test_a_quantized_model_is_not_quantized_again(recipe: Recipe, command: Command, work: Path) -> None:
    _, document = run_json(command, recipe(), "--until", "export")
    again = recipe("again.yaml", model=document["artifact"]["path"])
    before = sorted((work / ".compress" / "store").iterdir())
    for verb in ("plan", "run"):
        code, _, err = command(verb, again)
        assert code == 2
        assert "quantized already (quant_method 'compressed-tensors')" in err
    assert sorted((work / ".compress" / "store").iterdir()) == before


def test_a_missing_card_of_the_last_stage_is_found_before_the_first(
    recipe: Recipe, command: Command, work: Path
) -> None:
    code, _, err = command(
        "run", recipe(stages=[*RECIPE["stages"][:3], {**RECIPE["stages"][3], "data": "nowhere.yaml"}])
    )
    assert code == 2
    assert "nowhere.yaml" in err
    assert not (work / ".compress").exists()


def test_offline_covers_the_data_of_a_recipe(
    recipe: Recipe, command: Command, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    (work / "hub.yaml").write_text(
        "kind: huggingface\ntitle: t\nlicense: CC0-1.0\nsource: s\n"
        "dataset: org/name\nsplit: train\nrevision: main\n"
    )
    stages = [{**RECIPE["stages"][0], "data": "hub.yaml"}, *RECIPE["stages"][1:]]
    code, _, err = command("run", recipe(stages=stages), "--offline")
    assert code == 5
    assert "--offline" in err


def changed_model(
    model_dir: Path, path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]
) -> Path:
    """A copy of the model with other tensors or another config."""
    shutil.copytree(model_dir, path)
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_weight_that_is_not_finite_is_named_and_not_rounded(
    recipe: Recipe, command: Command, model_dir: Path, work: Path
) -> None:
    def spoil(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")

    broken = changed_model(model_dir, work / "broken", spoil)
    stages = [RECIPE["stages"][0], {"kind": "quantize", "round": {"kind": "rtn"}}, RECIPE["stages"][2]]
    code, _, err = command("run", recipe(model=str(broken), stages=stages))
    assert code == 2
    assert "layers.1.ffn.up.weight" in err


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    recipe: Recipe, command: Command, model_dir: Path, work: Path
) -> None:
    def shrink(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:300].clone()
        config["vocab_size"] = 300

    code, _, err = command("run", recipe(model=str(changed_model(model_dir, work / "small", shrink))))
    assert code == 2
    assert "300 embeddings" in err


@pytest.mark.slow
def test_finding_everything_cached_neither_changes_the_provenance_nor_pushes_new_evidence(
    recipe: Recipe, command: Command, work: Path
) -> None:
    path = recipe(push=PUSH)
    _, document = run_json(command, path)
    provenance = Path(document["report"]).with_name("provenance.json")
    first = provenance.read_bytes()
    blobs = sorted((work / "registry" / "blobs" / "sha256").iterdir())
    run_json(command, path)
    assert provenance.read_bytes() == first
    assert sorted((work / "registry" / "blobs" / "sha256").iterdir()) == blobs
    run_json(command, path, "--from", "validate")
    assert provenance.read_bytes() != first


def test_an_unchanged_run_names_no_report_that_is_not_there(recipe: Recipe, command: Command) -> None:
    path = recipe()
    run_json(command, path)
    assert run_json(command, path, "--if-changed", "--run-dir", "elsewhere")[1]["report"] is None


def test_links_of_a_run_hold_when_its_directory_is_behind_a_link(
    recipe: Recipe, command: Command, work: Path
) -> None:
    (work / "far" / "away").mkdir(parents=True)
    (work / "near").symlink_to(work / "far" / "away")
    _, document = run_json(command, recipe(), "--run-dir", "near/run", "--until", "export")
    assert (work / "near" / "run" / "artifacts" / "export").resolve() == Path(
        document["artifact"]["path"]
    ).resolve()


def test_resume_goes_on_in_the_workspace_of_the_run(recipe: Recipe, command: Command, work: Path) -> None:
    run_json(command, recipe(), "--workspace", "deep/cache", "--run-dir", "run", "--until", "quantize")
    code, out, err = command("resume", "run", "--json")
    assert code == 0, err
    assert [stage["cached"] for stage in json.loads(out)["stages"]] == [True, True, False, False]
    assert not (work / ".compress").exists()


def test_a_rebuild_that_was_cut_goes_on_with_the_same_command(
    recipe: Recipe, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    import compress.calibrate.sequential as sequential

    path = recipe()
    store = sequential.store_layer
    layers = list[int]()
    _, first = run_json(command, path, "--until", "quantize")

    def noted(out: Path, idx: int, *args: Any) -> None:
        store(out, idx, *args)
        layers.append(idx)
        if layers == [0]:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sequential, "store_layer", noted)
    rebuild = ("run", path, "--until", "quantize", "--from", "quantize", "--json")
    assert command(*rebuild)[0] == 143
    code, out, _ = command(*rebuild)
    assert code == 0
    assert layers == list(range(NUM_LAYERS))
    assert json.loads(out)["artifact"]["digest"] == first["artifact"]["digest"]


def test_push_by_hand_refuses_evidence_against_the_artifact_and_of_another(
    recipe: Recipe, command: Command, work: Path
) -> None:
    strict = [*RECIPE["stages"][:3], {**RECIPE["stages"][3], "gates": {"kl_mean": 1e-9}}]
    _, document = run_json(command, recipe(stages=strict))
    evidence = Path(document["report"]).parent
    artifact = document["artifact"]["path"]
    assert command("push", artifact, "layout://registry/a", "--evidence", evidence)[0] == 3
    report = json.loads((evidence / "report.json").read_text())
    report["artifact"]["digest"] = "sha256:" + "0" * 64
    (evidence / "report.json").write_text(json.dumps(report))
    code, _, err = command("push", artifact, "layout://registry/a", "--evidence", evidence)
    assert code == 2
    assert "validate this one first" in err
    assert not (work / "registry").exists()


def test_pickles_are_refused_in_one_sentence(
    recipe: Recipe, command: Command, model_dir: Path, work: Path
) -> None:
    unsafe = work / "unsafe"
    unsafe.mkdir()
    (unsafe / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    (unsafe / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    code, _, err = command("run", recipe(model=str(unsafe)))
    assert code == 2
    assert "pytorch_model.bin is a pickle" in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        (
            "version: 1\nmodel: m\nstages:\n  - {kind: quantize, shceme: W4A16_G128}\n",
            ":4:22:",
            "Did you mean 'scheme'?",
        ),
        ("version: 1\nmodel: m\nstages:\n  - kind: quantise\n", ":4:5:", "Did you mean 'quantize'?"),
        (
            "version: 1\nmodel: m\nstages:\n  - kind: quantize\n    round: {kind: gptq, dampning: 0.1}\n",
            ":5:25:",
            "Did you mean 'damping'?",
        ),
        ("version: 1\nmodel: m\nstages:\n  - kind: export\n", ":4:5:", "needs quantized"),
        (
            "version: 1\nmodel: m\nstages:\n  - kind: quantize\n    scheme: W4A16_G127\n",
            ":5:5:",
            "Did you mean 'W4A16_G128'?",
        ),
        (
            "version: 1\nmodel: m\nstages:\n  - kind: quantize\n  - kind: export\n    formats: [onyx]\n",
            ":6:5:",
            "unknown export format",
        ),
        (
            "version: 1\nmodel: m\nstages:\n  - kind: quantize\n  - kind: export\n    formats: [a, b]\n",
            ":6:5:",
            "unknown export format",
        ),
        (
            "version: 1\nmodel: m\nstages:\n  - kind: quantize\n"
            "  - kind: export\n    formats: [compressed-tensors, compressed-tensors]\n",
            ":6:5:",
            "each format once",
        ),
        (
            "version: 1\nmodel: m\nstages:\n  - kind: quantize\n"
            "  - kind: validate\n    gates: {kl_maen: 1}\n",
            ":6:5:",
            "Did you mean 'kl_mean'?",
        ),
    ],
)
def test_recipe_errors_point_at_line_and_column(
    command: Command, work: Path, text: str, where: str, words: str
) -> None:
    path = work / "recipe.yaml"
    path.write_text(text)
    code, _, err = command("run", path)
    assert code == 2
    assert f"recipe.yaml{where}" in err
    assert words in err


def test_a_flipped_byte_in_the_registry_is_named_by_pull(
    recipe: Recipe, command: Command, work: Path
) -> None:
    run_json(command, recipe(push=PUSH))
    assert command("pull", "layout://registry/tiny-w4:candidate", "good")[0] == 0
    blob = max((work / "registry" / "blobs" / "sha256").iterdir(), key=lambda path: path.stat().st_size)
    blob.chmod(0o644)
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    code, _, err = command("pull", "layout://registry/tiny-w4:candidate", "bad")
    assert code == 5
    assert blob.name in err
    assert not (work / "bad").exists()


def test_an_artifact_proves_itself_outside_a_recipe(
    recipe: Recipe, command: Command, model_dir: Path
) -> None:
    _, document = run_json(command, recipe(), "--until", "export")
    arguments = ("--against", model_dir, "--num-samples", 4, "--seq-len", 32, "--no-latency")
    code, out, err = command(
        "validate",
        document["artifact"]["path"],
        *arguments,
        "--out",
        "proof",
        "--gate",
        "ppl_ratio=2",
        "--json",
    )
    assert code == 0, err
    assert json.loads(out)["verdict"]["passed"] is True
    assert Path("proof/report.html").is_file()
    assert (
        command(
            "validate", document["artifact"]["path"], *arguments, "--out", "proof2", "--gate", "kl_mean=1e-12"
        )[0]
        == 3
    )
    for wrong in (("--num-samples", 0), ("--gate", "kl_maen=1"), ("--against", "builtin://reference")):
        code, _, err = command(
            "validate", document["artifact"]["path"], *arguments, "--out", "proof3", *wrong
        )
        assert code == 2
        assert "internal error" not in err


def test_a_push_of_what_was_exported_after_validation_is_refused(recipe: Recipe, command: Command) -> None:
    calibrate, quantize, export, validate = RECIPE["stages"]
    code, _, err = command("run", recipe(stages=[calibrate, quantize, validate, export], push=PUSH))
    assert code == 2
    assert "Put validate last" in err


def test_a_gate_on_the_command_line_may_name_its_device(
    recipe: Recipe, command: Command, model_dir: Path
) -> None:
    _, document = run_json(command, recipe(), "--until", "export")
    arguments = ("--against", model_dir, "--num-samples", 4, "--seq-len", 32, "--no-latency")
    gates = ("--gate", "tpot_ms_p50@cuda-sm90=2", "--gate", "ppl_ratio=2")
    code, out, err = command(
        "validate", document["artifact"]["path"], *arguments, "--out", "proof", *gates, "--json"
    )
    assert code == 0, err
    assert [gate["passed"] for gate in json.loads(out)["gates"]] == [None, True]
    assert (
        command(
            "validate", document["artifact"]["path"], *arguments, "--out", "other", "--gate", "ppl_ratio"
        )[0]
        == 2
    )


def test_resume_refuses_another_model_in_the_place_of_the_one_that_it_was_for(
    recipe: Recipe, command: Command, work: Path, model_dir: Path
) -> None:
    shutil.copytree(model_dir, work / "model")
    run = ("run", recipe(model="model"), "--run-dir", "run", "--until", "calibrate")
    assert command(*run)[0] == 0
    weights = work / "model" / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    lock = (work / "run" / "recipe.lock.yaml").read_bytes()
    code, _, err = command("resume", "run")
    assert code == 5
    assert "the model has changed since run/recipe.lock.yaml was written" in err
    assert (work / "run" / "recipe.lock.yaml").read_bytes() == lock
    weights.write_bytes(data)
    assert command("resume", "run")[0] == 0
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert command(*run)[0] == 0
    assert (work / "run" / "recipe.lock.yaml").read_bytes() != lock
