"""Pulls, pushes and conversions that a signal ends, in processes of their own."""

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from compress.artifact.leftovers import STALE_S, owned_name
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from compress.cli.app import main
from tests.support.processes import run_alone

DISTURBED = """
import os, signal, sys
import compress.registry.blobs as blobs
import compress.registry.layout as layout
from compress.cli.app import main
number = int(sys.argv[1])
copy = blobs.copy_blob
def copied(registry, blob, sink, **options):
    copy(registry, blob, sink, **options)
    if sink is not None:
        os.kill(os.getpid(), number)
blobs.copy_blob = copied
digest = layout.hashlib.sha256
class Disturbed:
    def __init__(self):
        self.inner = digest()
    def update(self, chunk):
        os.kill(os.getpid(), number)
        self.inner.update(chunk)
if sys.argv[2] == "push":
    layout.hashlib = type("hashlib", (), {"sha256": Disturbed})
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture
def artifact(work: Path) -> Path:
    def build(out: ArtifactWriter) -> None:
        (out.path / "a.txt").write_text("a")
        (out.path / "b.txt").write_text("b")
        out.describe(role="checkpoint")

    return Workspace(work / "w").commit("k" * 8, "export", {}, build).path


@pytest.fixture
def ref(artifact: Path, work: Path) -> str:
    ref = f"layout://{work}/registry/m:t"
    assert main(["push", str(artifact), ref]) == 0
    return ref


def pulling(work: Path) -> list[Path]:
    return sorted(each for each in work.iterdir() if each.name.endswith(".pulling"))


@pytest.mark.slow
def test_sigterm_ends_a_pull_with_143_one_document_and_nothing_left(ref: str, work: Path) -> None:
    ended = run_alone(int(signal.SIGTERM), "pull", ref, work / "copy", "--json", code=DISTURBED)
    assert ended.returncode == 143, ended.stderr
    assert json.loads(ended.stdout)["error"]["kind"] == "Interrupted"
    assert ended.stderr.startswith("compress: stopped by SIGTERM")
    assert not (work / "copy").exists()
    assert pulling(work) == []
    assert run_alone("pull", ref, work / "copy").returncode == 0


def test_sigterm_ends_a_push_with_143_and_neither_tag_nor_temporary_file(artifact: Path, work: Path) -> None:
    target = f"layout://{work}/new/m:t"
    ended = run_alone(int(signal.SIGTERM), "push", artifact, target, "--json", code=DISTURBED)
    assert ended.returncode == 143, ended.stderr
    assert json.loads(ended.stdout)["exit_code"] == 143
    assert list((work / "new" / ".tmp").iterdir()) == []
    assert not (work / "new" / "index.json").exists()
    assert run_alone("push", artifact, target).returncode == 0


def test_what_a_killed_pull_leaves_goes_with_the_next_pull(ref: str, work: Path) -> None:
    ended = run_alone(int(signal.SIGKILL), "pull", ref, work / "copy", code=DISTURBED)
    assert ended.returncode == -signal.SIGKILL
    assert len(pulling(work)) == 1
    other = work / f".other.{owned_name()}.pulling"
    other.mkdir()
    assert main(["pull", ref, str(work / "copy")]) == 0
    assert pulling(work) == [other], "and nothing of a pull to another place"


def test_a_pull_in_progress_here_or_lately_on_another_host_is_left_alone(ref: str, work: Path) -> None:
    here = socket.gethostname().replace("-", ".")
    alive = work / f".copy.{here}-{os.getppid()}-ab12.pulling"
    lately = work / ".copy.elsewhere-1-ab12.pulling"
    stale = work / ".copy.elsewhere-2-ab12.pulling"
    old_name = work / ".copy.1234abcd.pulling"
    for each in (alive, lately, stale, old_name):
        each.mkdir()
    long_ago = stale.stat().st_mtime - 2 * STALE_S
    for each in (stale, old_name, alive):
        os.utime(each, (long_ago, long_ago))
    (work / "kept").mkdir()
    link = work / f".copy.{here}-999999999-ab12.pulling"
    link.symlink_to(work / "kept")
    assert main(["pull", ref, str(work / "copy")]) == 0
    assert pulling(work) == sorted([alive, lately, link])
    assert (work / "kept").is_dir()
