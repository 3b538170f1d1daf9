"""The stage cache: whatever instant a run dies at, a result is wholly there or not there."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compress.artifact.atomic import write_atomic
from compress.artifact.manifest import MANIFEST_NAME, verify_artifact
from compress.artifact.workspace import Workspace
from compress.artifact.workspace_sizes import measure
from compress.artifact.writer import ArtifactWriter
from compress.errors import LockHeld

KEY = Workspace.key("quantize", 1, {"bits": 4}, {"model": "sha256:aa"}, 0)


def _build(writer: ArtifactWriter) -> None:
    (writer.path / "sub").mkdir()
    (writer.path / "sub" / "data.bin").write_bytes(bytes(100))
    (writer.path / "config.json").write_text("{}")
    writer.describe(role="quantized", facts={"shape": (1, 2)})


def _leftovers(workspace: Workspace) -> list[Path]:
    return list((workspace.root / "tmp").glob("*"))


def test_everything_that_decides_a_result_is_in_its_key() -> None:
    base = {"stage": "s", "version": 1, "spec": {"a": 1, "b": 2}, "inputs": {"m": "x", "c": "y"}, "seed": 0}
    changes = [
        {"stage": "t"},
        {"version": 2},
        {"spec": {"a": 1}},
        {"inputs": {"m": "y", "c": "x"}},
        {"seed": 1},
        {"extra": {"device": "sm90"}},
    ]
    keys = [Workspace.key(**{**base, **change}) for change in changes] + [Workspace.key(**base)]
    assert len(set(keys)) == len(keys)
    assert Workspace.key(**{**base, "spec": {"b": 2, "a": 1}}) == Workspace.key(**base)
    assert all(len(key) == 64 and int(key, 16) >= 0 for key in keys)


def test_a_committed_result_is_found_whole_and_built_once(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    assert workspace.get(KEY) is None
    (workspace.scratch(KEY) / "layer-0").write_text("resume")
    artifact = workspace.commit(KEY, "quantize", {"model": "sha256:aa"}, _build)
    verify_artifact(artifact)
    assert artifact.manifest.provenance == {
        "stage": "quantize",
        "key": KEY,
        "parents": {"model": "sha256:aa"},
    }
    assert artifact.manifest.facts == {"shape": [1, 2]}
    assert workspace.get(KEY) == artifact
    assert workspace.commit(KEY, "quantize", {}, lambda writer: pytest.fail("built twice")) == artifact
    assert not _leftovers(workspace)
    assert not (tmp_path / "scratch" / KEY).exists()


def test_two_workspaces_give_one_digest(tmp_path: Path) -> None:
    digests = {Workspace(tmp_path / name).commit(KEY, "quantize", {}, _build).digest for name in ("a", "b")}
    assert len(digests) == 1


def test_a_failure_at_any_system_call_leaves_no_half_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fail_at in range(100):
        workspace = Workspace(tmp_path / str(fail_at))
        calls = 0

        def failing(real, fail_at=fail_at):
            def call(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls > fail_at:
                    raise OSError(5, "injected")
                return real(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in ("fsync", "rename", "replace"):
                patch.setattr(os, name, failing(getattr(os, name)))
            try:
                workspace.commit(KEY, "quantize", {}, _build)
                break  # every call went through
            except OSError:
                assert calls == fail_at + 1
        if (found := workspace.get(KEY)) is not None:
            verify_artifact(found)
        assert not _leftovers(workspace)
        verify_artifact(workspace.commit(KEY, "quantize", {}, _build))
    assert fail_at >= 7  # two files, two directories, the manifest and its rename, the result's rename


def test_a_killed_run_leaves_its_scratch_and_nothing_else(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from compress.artifact.workspace_sizes import measure
from compress.artifact.workspace import Workspace
workspace = Workspace(Path({str(tmp_path)!r}))
def build(writer):
    (writer.path / "big").write_bytes(bytes(1000))
    (workspace.scratch({KEY!r}) / "layer-0").write_text("done")
    os.kill(os.getpid(), signal.SIGKILL)
with workspace.lock():
    workspace.commit({KEY!r}, "quantize", {{}}, build)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    workspace = Workspace(tmp_path)
    assert workspace.get(KEY) is None
    assert len(_leftovers(workspace)) == 1
    with workspace.lock():
        assert not _leftovers(workspace)
    assert (workspace.scratch(KEY) / "layer-0").read_text() == "done"


def test_resume_points_of_a_finished_result_are_left_by_a_kill_and_collected(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    other = KEY.replace(KEY[0], "0" if KEY[0] != "0" else "1")
    workspace.commit(KEY, "quantize", {}, lambda writer: writer.describe(role="quantized", facts={}))
    for key in (KEY, other):
        (workspace.scratch(key) / "layer-0").write_text("done")
    found = {
        each.path.name: each.kind for each in measure(workspace).entries if each.path.parent.name == "scratch"
    }
    assert found == {KEY: "leftover", other: "resume point"}
    with workspace.share():
        assert [each.name for each in (tmp_path / "scratch").iterdir()] == [other]
    assert workspace.damage(KEY) is None


def test_the_build_of_a_living_process_is_not_collected(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)

    def build(writer: ArtifactWriter) -> None:
        with workspace.lock():
            assert writer.path.exists()
        _build(writer)

    verify_artifact(workspace.commit(KEY, "quantize", {}, build))


@pytest.mark.parametrize("damage", ["manifest", "cut", "missing", "other key"])
def test_a_damaged_result_is_never_returned_and_is_replaced(tmp_path: Path, damage: str) -> None:
    workspace = Workspace(tmp_path)
    path = workspace.commit(KEY, "quantize", {}, _build).path
    if damage == "manifest":
        (path / MANIFEST_NAME).write_bytes((path / MANIFEST_NAME).read_bytes()[:-10])
    elif damage == "cut":
        (path / "sub" / "data.bin").write_bytes(bytes(99))
    elif damage == "missing":
        (path / "config.json").unlink()
    else:
        path.rename(path.with_name("f" * 64))
    assert workspace.get(KEY) is None
    assert workspace.get("f" * 64) is None
    verify_artifact(workspace.commit(KEY, "quantize", {}, _build))
    assert not _leftovers(workspace)


def test_losing_a_race_returns_the_winner(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)

    def slow(writer: ArtifactWriter) -> None:
        Workspace(tmp_path).commit(KEY, "quantize", {}, _build)
        _build(writer)

    verify_artifact(workspace.commit(KEY, "quantize", {}, slow))
    assert not _leftovers(workspace)


def test_a_build_that_describes_nothing_or_nonsense_fails_where_it_is_made(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    with pytest.raises(ValueError, match="describe"):
        workspace.commit(KEY, "quantize", {}, lambda writer: None)
    with pytest.raises(ValueError):
        workspace.commit(
            KEY, "quantize", {}, lambda writer: writer.describe(role="x", facts={"loss": float("nan")})
        )
    with pytest.raises(ValueError):
        workspace.get("../outside")


ME = f"process {os.getpid()} on "


def test_who_is_alone_in_a_workspace_is_named_to_everybody_else(tmp_path: Path) -> None:
    for other in (Workspace(tmp_path).lock, Workspace(tmp_path).share):
        with Workspace(tmp_path).lock(), pytest.raises(LockHeld, match=ME), other():
            pytest.fail("beside one that is alone")
    with Workspace(tmp_path).lock():
        assert len(list((tmp_path / "holders").iterdir())) == 1
    assert not list((tmp_path / "holders").iterdir())


def test_runs_share_a_workspace_and_nobody_is_alone_until_the_last_has_ended(tmp_path: Path) -> None:
    with Workspace(tmp_path).share():
        with Workspace(tmp_path).share(), pytest.raises(LockHeld, match=f"{ME}.*, {ME}"):
            Workspace(tmp_path).lock().__enter__()
        with pytest.raises(LockHeld, match=ME):
            Workspace(tmp_path).lock().__enter__()
    with Workspace(tmp_path).lock():
        pass


def test_of_many_processes_that_need_one_result_one_builds_it(tmp_path: Path) -> None:
    code = f"""
import os, time
from pathlib import Path
from compress.artifact.workspace_sizes import measure
from compress.artifact.workspace import Workspace
workspace = Workspace(Path({str(tmp_path)!r}))
def build(writer):
    (workspace.root / f"built-{{os.getpid()}}").touch()
    time.sleep(0.2)
    (writer.path / "data.bin").write_bytes(bytes(1000))
    writer.describe(role="checkpoint")
with workspace.share(), workspace.building({KEY!r}, wait=lambda: time.sleep(0.01)):
    print(workspace.commit({KEY!r}, "quantize", {{}}, build).digest)
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    digests = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    assert len(digests) == 1
    assert len(list(tmp_path.glob("built-*"))) == 1
    assert not list((tmp_path / "locks").iterdir())


def test_the_builder_is_waited_for_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
from pathlib import Path
from compress.artifact.workspace_sizes import measure
from compress.artifact.workspace import Workspace
workspace = Workspace(Path({str(tmp_path)!r}))
with workspace.share(), workspace.building({KEY!r}, wait=sys.exit):
    print("holds", flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == "holds\n"
    looks: list[int] = []

    def wait() -> None:
        looks.append(1)
        if len(looks) == 3:
            assert holder.stdin is not None
            holder.stdin.close()
            holder.wait()

    workspace = Workspace(tmp_path)
    with workspace.building(KEY, wait=wait):
        assert len(looks) >= 3
    with workspace.building("b" * 64, wait=lambda: pytest.fail("another result")):
        assert [each.name for each in (tmp_path / "locks").iterdir()] == ["b" * 64]
    with workspace.lock():
        pass
    holder.stdout.close()


def test_who_waits_may_give_up(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)

    def give_up() -> None:
        raise LockHeld("enough")

    with workspace.building(KEY, wait=give_up):
        with pytest.raises(LockHeld, match="enough"), workspace.building(KEY, wait=give_up):
            pytest.fail("two builders")
        assert (tmp_path / "locks" / KEY).exists()


def test_an_interrupted_replacement_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "index.json"
    write_atomic(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError):
        write_atomic(path, b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["index.json"]
    assert path.read_bytes() == b"old"


def test_the_fresh_build_of_another_host_is_not_collected(tmp_path: Path) -> None:
    build = tmp_path / "tmp" / "otherhost-77-abc"
    build.mkdir(parents=True)
    with Workspace(tmp_path).lock():
        assert build.is_dir()
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(build, (two_days_ago, two_days_ago))
    with Workspace(tmp_path).lock():
        assert not build.exists()
