"""What every registry promises of storage that somebody spoiled: pull and verify end with exit code 5 and one
sentence, and nothing is written.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.artifact.manifest import Artifact
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from compress.cli.app import main
from compress.digest import digest_bytes
from compress.registry.image import TITLE
from compress.registry.protocol import REGISTRIES, open_registry
from compress.registry.transfer import push
from tests.support.registries import SAME_BACKEND
from tests.support.stored import STORED, Stored

WEIGHTS = bytes(range(256)) * 400
KINDS = [name for name in REGISTRIES.names() if name not in SAME_BACKEND]


@pytest.fixture(params=KINDS)
def stored(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stored:
    assert request.param in STORED, f"tests/support/stored.py does not know {request.param}"
    return STORED[request.param](tmp_path / "storage", monkeypatch)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The directory that pulls write to."""
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


def _artifact(root: Path, weights: bytes = WEIGHTS) -> Artifact:
    def build(writer: ArtifactWriter) -> None:
        (writer.path / "weights.bin").write_bytes(weights)
        (writer.path / "config.json").write_text("{}")
        writer.describe(role="checkpoint")

    key = Workspace.key("test", 1, {}, {}, len(weights))
    return Workspace(root / "workspace").commit(key, "test", {}, build)


def _edited(manifest: bytes, edit: Callable[[list[dict[str, Any]]], None]) -> bytes:
    document = json.loads(manifest)
    edit(document["layers"])
    return json.dumps(document).encode()


def _refused(ref: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["pull", ref, str(here / "out")], ["verify", ref]):
        capsys.readouterr()
        assert main(command) == 5, command
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert said.strip()
        assert list(here.iterdir()) == []


@pytest.mark.parametrize("damage", ["one byte", "longer", "shorter", "empty"])
@pytest.mark.one_in(6)
def test_a_blob_of_other_bytes_is_refused(
    stored: Stored, damage: str, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    push(open_registry(stored.url), _artifact(tmp_path), name="model")
    digest = digest_bytes(WEIGHTS)
    assert stored.read(digest) == WEIGHTS
    flipped = WEIGHTS[:-1] + bytes([WEIGHTS[-1] ^ 1])
    stored.replace(
        digest, {"one byte": flipped, "longer": WEIGHTS * 9, "shorter": WEIGHTS[:-1]}.get(damage, b"")
    )
    _refused(f"{stored.url}/model", here, capsys)


@pytest.mark.one_in(6)
def test_a_manifest_in_the_place_of_another_is_refused(
    stored: Stored, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = push(open_registry(stored.url), _artifact(tmp_path, b"other"), name="model", aliases=["other"])
    right = push(open_registry(stored.url), _artifact(tmp_path), name="model")
    stored.replace(right.manifest_digest, stored.read(other.manifest_digest))
    _refused(f"{stored.url}/model", here, capsys)
    _refused(f"{stored.url}/model@{right.manifest_digest}", here, capsys)


@pytest.mark.one_in(6)
def test_an_artifact_manifest_in_the_place_of_another_is_refused(
    stored: Stored, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = push(open_registry(stored.url), _artifact(tmp_path, b"other"), name="model", aliases=["other"])
    right = push(open_registry(stored.url), _artifact(tmp_path), name="model")
    stored.replace(right.artifact_digest, stored.read(other.artifact_digest))
    _refused(f"{stored.url}/model", here, capsys)


@pytest.mark.parametrize("title", ["../outside.bin", "{absolute}", "a/../../outside.bin", ""])
@pytest.mark.one_in(6)
def test_a_title_that_leads_out_of_the_destination_is_refused(
    stored: Stored, title: str, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pushed = push(open_registry(stored.url), _artifact(tmp_path), name="model")
    path = title.format(absolute=tmp_path / "outside.bin")
    bad = _edited(stored.read(pushed.manifest_digest), lambda layers: _set_title(layers, path))
    stored.point(bad)
    _refused(f"{stored.url}/model", here, capsys)
    assert not list(tmp_path.rglob("outside*"))


@pytest.mark.parametrize("size", [1, len(WEIGHTS) * 2, 1 << 59])
@pytest.mark.one_in(6)
def test_a_layer_of_another_size_than_the_artifact_states_is_refused(
    stored: Stored, size: int, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pushed = push(open_registry(stored.url), _artifact(tmp_path), name="model")
    bad = _edited(stored.read(pushed.manifest_digest), lambda layers: layers[-1].update(size=size))
    stored.point(bad)
    _refused(f"{stored.url}/model", here, capsys)


def _set_title(layers: list[dict[str, Any]], title: str) -> None:
    layers[-1]["annotations"][TITLE] = title
