"""A byte changed anywhere in a workspace or in evidence: nothing wrong is published; the next run heals."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compress.artifact.manifest import MANIFEST_NAME, open_artifact, verify_artifact
from compress.artifact.workspace import Workspace
from compress.errors import Interrupted
from compress.registry.evidence import SEAL_NAME
from compress.registry.stored import list_tags
from tests.e2e.test_distill import DISTILL, PRUNE
from tests.e2e.test_draft import DRAFT
from tests.support.slow import slow
from tests.support.tiny_run import RECIPE

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
CALIBRATE, QUANTIZE, EXPORT, VALIDATE = RECIPE["stages"]
STAGES = [CALIBRATE, PRUNE, DISTILL, QUANTIZE, DRAFT, EXPORT, VALIDATE]
PUSH = {"to": "layout://registry", "name": "tiny", "aliases": ["candidate"]}


def flip(file: Path, at: float = 0.5) -> None:
    """Change one bit of a file, at a part of its length."""
    data = bytearray(file.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)


def outcome(command: Command, path: Path) -> tuple[dict[str, Any], str]:
    """Run a recipe that succeeds; return its document and what it told on stderr."""
    code, out, err = command("run", path, "--json")
    assert code == 0, err
    return json.loads(out), err


def facts(document: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a healed run has in common with the first: digests of weights, and what was pushed."""
    digests = {each["kind"]: each["digest"] for each in document["stages"] if each["kind"] != "validate"}
    return digests, document["artifact"]["digest"], document["pushed"]["manifest"]


def stored(work: Path) -> Iterator[tuple[str, Path]]:
    """Yield the stage and the path of every file in the workspace's store."""
    for entry in sorted((work / ".compress" / "store").iterdir()):
        stage = open_artifact(entry).manifest.provenance["stage"]
        for file in sorted(each for each in entry.rglob("*") if each.is_file()):
            yield stage, file


def heals(command: Command, path: Path, damaged: dict[str, Path], first: dict[str, Any]) -> None:
    """Run again, with a damaged file in each of some stages."""
    again, err = outcome(command, path)
    assert facts(again) == facts(first), damaged
    for stage, file in damaged.items():
        assert f"'{stage}' is built again" in err, file
        assert str(file.relative_to(Path.cwd())) in err.replace(str(Path.cwd()) + "/", ""), err
    cached = {each["kind"]: each["cached"] for each in again["stages"]}
    assert not any(cached[stage] for stage in damaged)
    for entry in Path(".compress/store").iterdir():
        verify_artifact(open_artifact(entry))


def test_a_changed_byte_is_found_named_set_aside_and_healed(
    recipe: Recipe, command: Command, work: Path
) -> None:
    path = recipe(stages=[CALIBRATE, QUANTIZE, EXPORT, VALIDATE], push=PUSH)
    first, _ = outcome(command, path)
    chosen = {"calibrate": "tokens.safetensors", "export": MANIFEST_NAME, "validate": "report.json"}
    damaged = {stage: file for stage, file in stored(work) if file.name == chosen.get(stage)}
    assert damaged.keys() == chosen.keys()
    for file in damaged.values():
        flip(file)
    heals(command, path, damaged, first)
    assert len(list((work / ".compress" / "damaged").iterdir())) == len(damaged)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(4))
def test_a_changed_byte_in_any_file_of_any_stage_is_healed(
    start: int, recipe: Recipe, command: Command, work: Path
) -> None:
    """One file of each stage at a time, every fourth of them in a workspace of its own."""
    path = recipe(stages=STAGES, push=PUSH)
    first, _ = outcome(command, path)
    places = iter((0.02, 0.3, 0.5, 0.77, 0.98) * 100)
    files: dict[str, list[Path]] = {}
    for stage, file in stored(work):
        files.setdefault(stage, []).append(file)
    for turn in range(start, max(map(len, files.values())), 4):
        damaged = {stage: each[turn] for stage, each in files.items() if turn < len(each)}
        for file in damaged.values():
            flip(file, next(places))
        heals(command, path, damaged, first)


GUIDED = {**QUANTIZE, "guide": {}, "tune": {"epochs": 1, "batch_size": 2}, "kv_cache": "fp8"}
MIXED = {
    **QUANTIZE,
    "scheme": {
        "kind": "mixed",
        "schemes": ["W4A16_G128", "W8A16"],
        "budget": {"size_ratio": 0.5},
        "num_samples": 4,
    },
}
SEARCHED = {**PRUNE, "ffn": None, "target": {"params_frac": 0.8, "num_samples": 4}, "score": "taylor"}
ROUNDS = {**PRUNE, "rounds": 2, "score": "taylor", "depth": {"keep": 2}}
SAMPLED = {**DISTILL, "sample": {"prompt_tokens": 8}, "loss": {"top_k": 8}}
RESUMED: dict[str, list[dict[str, Any]]] = {
    "quantize": [CALIBRATE, QUANTIZE],
    "guide": [CALIBRATE, GUIDED],
    "mixed": [CALIBRATE, MIXED],
    "search": [CALIBRATE, SEARCHED],
    "rounds": [CALIBRATE, ROUNDS],
    "distill": [CALIBRATE, PRUNE, SAMPLED],
    "draft": [CALIBRATE, QUANTIZE, {**DRAFT, "quantize": {"scheme": "W8A16", "round": {"kind": "rtn"}}}],
}
WRITTEN_AGAIN = {"outer.safetensors", "tokens.safetensors", "store", "seals", "tuned"}
"""Files and directories of scratch that a resumed run writes again, or that are sealed."""


def is_read(point: Path) -> bool:
    """Return whether a run that is resumed at its very end reads a file of scratch: of a finished round of
    pruning only the weights and the facts, of a finished search only the losses."""
    _, _, *inside, name = point.parts
    if set(point.parts) & WRITTEN_AGAIN:
        return False
    if inside[:1] == ["search"]:
        return len(inside) == 1
    return (
        inside == []
        or name.endswith(".safetensors") != (name == "losses.safetensors")
        or name == "round.json"
    )


@pytest.mark.parametrize("name", ["quantize", *(slow(each) for each in RESUMED if each != "quantize")])
@pytest.mark.slow
def test_a_changed_byte_in_any_resume_point_is_done_again(
    name: str, recipe: Recipe, command: Command, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe(stages=RESUMED[name])
    kind = RESUMED[name][-1]["kind"]

    def cut(self: Workspace, building: Path, key: str, digest: str) -> None:
        if self.root.name == "whole" and kind in (building / MANIFEST_NAME).read_text():
            raise Interrupted("here", signal_number=15)
        publish(self, building, key, digest)

    publish = Workspace._publish
    monkeypatch.setattr(Workspace, "_publish", cut)
    code, _, err = command("run", path, "--workspace", "whole")
    assert code == 143, err
    points = [
        each for each in (work / "whole").glob("scratch/*/**/*") if each.is_file() and each.stat().st_size
    ]
    points += [each for each in (work / "whole").glob("kept/**/*") if each.is_file()]
    assert len(points) >= 3
    shutil.copytree("whole", "undamaged")
    code, out, err = command("run", path, "--workspace", "undamaged", "--json")
    assert code == 0, err
    first = [each["digest"] for each in json.loads(out)["stages"]]
    for idx, point in enumerate(point.relative_to(work / "whole") for point in points):
        shutil.copytree("whole", "again")
        flip(Path("again") / point, (0.97, 0.5, 0.8)[idx % 3])
        code, out, err = command("run", path, "--workspace", "again", "--json")
        assert code == 0, err
        assert [each["digest"] for each in json.loads(out)["stages"]] == first, point
        if is_read(point):
            assert f"{point} is damaged" in err
        shutil.rmtree("again")


def test_a_damaged_artifact_of_a_workspace_is_refused_by_every_command_that_builds_upon_it(
    recipe: Recipe, command: Command, work: Path, model_dir: Path
) -> None:
    path = recipe(stages=[CALIBRATE, QUANTIZE, EXPORT])
    outcome(command, path)
    artifact = (work / "runs" / "recipe" / "artifacts" / "export").resolve()
    commands: list[tuple[object, ...]] = [
        ("convert", artifact, "--to", "gptq", "--out", "converted"),
        ("validate", artifact, "--against", model_dir, "--no-latency", "--out", "proof"),
    ]
    whole = {file: file.read_bytes() for file in artifact.iterdir() if file.is_file()}
    for file, data in whole.items():
        flip(file)
        reading = [("inspect", artifact), ("generate", artifact, "a")] if file.name == MANIFEST_NAME else []
        push = ("push", artifact, f"layout://for-{file.name}/tiny:damaged")  # a new one: it has no blob yet
        for each in [push, *commands, *reading]:
            code, out, err = command(*each)
            assert code in (2, 5), (file.name, each, out)
            assert len(err.strip().splitlines()) == 1, err
        file.write_bytes(data)
    assert not list(work.glob("for-*/index.json"))
    assert not (work / "converted").exists()
    assert command("convert", artifact, "--to", "gptq", "--out", "converted")[0] == 0


def test_a_damaged_artifact_is_not_pushed_where_all_its_blobs_are_already(
    recipe: Recipe, command: Command, work: Path
) -> None:
    outcome(command, recipe(stages=[CALIBRATE, QUANTIZE, EXPORT], push=PUSH))
    shutil.copytree(work / "runs" / "recipe" / "artifacts" / "export", work / "copy")
    push = ("push", "copy", "layout://registry/tiny:again")
    for file in [each for each in (work / "copy").iterdir() if each.name != MANIFEST_NAME]:
        data = file.read_bytes()
        flip(file)
        code, _, err = command(*push)
        assert code in (2, 5)
        assert file.name in err
        file.unlink()
        assert command(*push)[0] in (2, 5)
        file.write_bytes(data)
    (work / "copy" / "mine.txt").write_text("x")
    code, _, err = command(*push)
    assert code == 5
    assert "mine.txt" in err
    (work / "copy" / "mine.txt").unlink()
    assert "again" not in {each.tag for each in list_tags("layout://registry")}
    assert command(*push)[0] == 0


@pytest.mark.slow
def test_damaged_evidence_is_not_pushed(recipe: Recipe, command: Command, work: Path) -> None:
    outcome(command, recipe(push=PUSH))
    tags = (work / "registry" / "index.json").read_bytes()
    evidence = work / "runs" / "recipe" / "evidence"
    push = ("push", "runs/recipe/artifacts/export", "layout://registry/tiny:again", "--evidence", evidence)
    names = {each.name for each in evidence.iterdir()}
    assert {"report.json", "report.html", "README.md", "provenance.json", SEAL_NAME} <= names
    for file in [each for each in evidence.rglob("*") if each.is_file()]:
        data = file.read_bytes()
        for at in (0.1, 0.5, 0.9):
            flip(file, at)
            code, _, err = command(*push)
            assert code in (2, 5), file
            assert str(evidence) in err
            file.write_bytes(data)
    (evidence / "extra").write_text("")
    assert command(*push)[0] == 5
    (evidence / "extra").unlink()
    assert (work / "registry" / "index.json").read_bytes() == tags
    assert command(*push)[0] == 0
    assert command("pull", "layout://registry/tiny:again", "copy", "--evidence", "proof")[0] == 0
    assert {each.name for each in (work / "proof").iterdir()} == names
