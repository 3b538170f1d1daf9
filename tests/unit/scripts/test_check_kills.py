"""The script that kills commands: what it kills ends with the same digests, and damage is seen."""

import json
from pathlib import Path

import pytest

from compress.artifact.manifest import open_artifact
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from scripts import check_kills
from tests.support.tiny_model import write_tiny_model
from tests.support.tiny_run import RECIPE

PUSH = {"to": "layout://registry", "name": "tiny"}


@pytest.mark.slow
def test_killed_commands_end_with_the_same_digests(tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.yaml"
    model = tmp_path / "model"
    model.mkdir()
    write_tiny_model(model)
    stages = [*RECIPE["stages"][:3], {**RECIPE["stages"][3], "latency": None}]
    recipe.write_text(json.dumps({**RECIPE, "model": str(model), "stages": stages, "push": PUSH}))
    out = tmp_path / "kills.json"
    arguments = ["--kills", "8", "--recipe", str(recipe), "--commit", "c", "--out", str(out)]
    assert check_kills.main(arguments) == 0
    document = json.loads(out.read_text())
    assert [row["command"] for row in document["rows"]] == ["tiny", "push", "pull"]
    assert sum(row["kills"] for row in document["rows"]) == 8
    assert all(row["ends"] >= 1 for row in document["rows"])


def test_what_is_not_whole_is_seen(tmp_path: Path) -> None:
    def build(out: ArtifactWriter) -> None:
        (out.path / "a.txt").write_text("a")
        out.describe(role="export")

    workspace = Workspace(tmp_path / "workspace")
    path = workspace.commit("k" * 8, "export", {}, build).path
    assert check_kills.broken(tmp_path) == []
    open_artifact(path).file("a.txt").write_text("b")
    assert len(check_kills.broken(tmp_path)) == 1
