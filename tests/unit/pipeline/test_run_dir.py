"""The directory of a run: what others put there is neither lost nor followed; a changed lock is refused."""

from pathlib import Path

import pytest

from compress.artifact.manifest import Artifact
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from compress.errors import StorageError
from compress.pipeline.run_dir import RunDir
from compress.registry.evidence import check_evidence
from tests.support.hostile import make_fifo


def evidence_of(root: Path, name: str) -> Artifact:
    def build(out: ArtifactWriter) -> None:
        (out.path / "report.json").write_text("{}")
        (out.path / name).write_text("a")
        out.describe(role="evidence")

    return Workspace(root / "workspace").commit(
        Workspace.key("test", 1, {}, {}, len(name)), "test", {}, build
    )


def test_evidence_replaces_that_of_an_earlier_recipe_and_nothing_else(tmp_path: Path) -> None:
    directory = RunDir(tmp_path / "run")
    directory.check()
    for name in ("a.svg", "picture.svg"):
        directory.write_evidence(evidence_of(tmp_path, name), {"provenance.json": {"artifacts": {}}})
        check_evidence(directory.evidence)
    assert not (directory.evidence / "a.svg").exists()
    (directory.evidence / "notes").mkdir()
    (directory.evidence / "notes" / "mine.txt").write_text("mine")
    for call in (directory.check, lambda: directory.write_evidence(evidence_of(tmp_path, "a.svg"), {})):
        with pytest.raises(StorageError, match=r"notes/mine\.txt is not part of the evidence; move it"):
            call()
    assert (directory.evidence / "notes" / "mine.txt").read_text() == "mine"


def test_a_link_in_the_place_of_evidence_is_not_followed(tmp_path: Path) -> None:
    directory = RunDir(tmp_path / "run")
    (tmp_path / "mine").mkdir()
    directory.path.mkdir()
    directory.evidence.symlink_to(tmp_path / "mine")
    with pytest.raises(StorageError, match="is a link; remove it"):
        directory.check()
    with pytest.raises(StorageError, match="is a link; remove it"):
        directory.write_evidence(evidence_of(tmp_path, "a.svg"), {})
    assert list((tmp_path / "mine").iterdir()) == []


def test_the_log_is_a_plain_file_with_one_line_an_event(tmp_path: Path) -> None:
    directory = RunDir(tmp_path / "run")
    directory.log("a\n2020-01-01 forged \u202e \udcff")
    (line,) = (directory.path / "run.log").read_text().splitlines()
    assert line.endswith(r"a\n2020-01-01 forged \u202e \udcff")
    (directory.path / "run.log").unlink()
    make_fifo(directory.path / "run.log")
    with pytest.raises(StorageError, match="no plain file"):
        directory.log("a")


def test_a_changed_lock_is_refused(tmp_path: Path) -> None:
    directory = RunDir(tmp_path / "run")
    directory.write_lock({"version": 1, "seed": 3}, model_digest="sha256:0")
    directory.check_lock()
    content = directory.lock.read_text()
    for changed in (content.replace("seed: 3", "seed: 2"), content + "model: x\n", "", content[:-9]):
        directory.lock.write_text(changed)
        with pytest.raises(StorageError, match="has changed since it was written"):
            directory.check_lock()


@pytest.mark.parametrize(
    ("name", "is_directory", "message"),
    [
        ("evidence", False, "evidence is no directory; move it"),
        ("artifacts", False, "artifacts is no directory; move it"),
        ("artifacts/export", True, "artifacts/export is a directory; move it"),
    ],
)
def test_what_has_the_name_of_something_that_a_run_makes_is_refused_before_it(
    tmp_path: Path, name: str, is_directory: bool, message: str
) -> None:
    directory = RunDir(tmp_path / "run")
    place = directory.path / name
    place.parent.mkdir(parents=True)
    place.mkdir() if is_directory else place.write_text("mine")
    with pytest.raises(StorageError, match=message):
        directory.check()
    assert place.exists()


def test_a_workspace_in_the_run_directory_needs_no_link_and_another_directory_is_refused(
    tmp_path: Path,
) -> None:
    directory = RunDir(tmp_path / "run")
    own = directory.path / "workspace"
    own.mkdir(parents=True)
    directory.link_workspace(own)
    assert not own.is_symlink()
    assert directory.workspace is not None
    assert directory.workspace.resolve() == own
    (tmp_path / "other").mkdir()
    with pytest.raises(StorageError, match="workspace is a directory; move it"):
        directory.link_workspace(tmp_path / "other")
    own.rename(tmp_path / "moved")
    directory.link_workspace(tmp_path / "other")
    directory.link_workspace(tmp_path / "moved")
    assert directory.workspace.resolve() == tmp_path / "moved"
