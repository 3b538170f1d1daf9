"""The sizes of a workspace are those of `du`, by entry, with what names share counted once."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from compress.artifact.collection import Policy, choose, remove
from compress.artifact.workspace import Workspace
from compress.artifact.workspace_sizes import GRACE_S, apparent_bytes, disk_bytes, freed_bytes, measure
from tests.support.stored_run import recipe_of, store_run


def du(path: Path) -> int:
    """Return the bytes on disk, hard links once, by the system's own program."""
    answer = subprocess.run(["du", "-s", "--block-size=1", path], check=True, capture_output=True, text=True)
    return int(answer.stdout.split()[0])


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A workspace with entries of every kind; two of them share a file."""
    place = Workspace(tmp_path / "w")
    stored = store_run(place, *recipe_of())
    first = stored[0][1].path
    scratch = place.scratch("b" * 64)
    os.link(first / "part" / "weights.bin", scratch / "same")
    (scratch / "point").write_bytes(bytes(9000))
    (place.kept / "teacher-1").mkdir()
    (place.kept / "teacher-1" / "0.safetensors").write_bytes(bytes(70000))
    (place.root / "damaged" / ("c" * 64)).mkdir(parents=True)
    (place.root / "tmp" / "otherhost-1-ab").mkdir(parents=True)
    (place.root / "notes.txt").write_text("mine")
    return place


def test_all_entries_add_up_to_what_du_says(workspace: Workspace) -> None:
    sizes = measure(workspace)
    assert sizes.disk_bytes == du(workspace.root)
    kinds = {each.kind for each in sizes.entries}
    assert kinds == {"result", "resume point", "kept", "damaged", "in progress", "record", "other"}
    files = {
        entry.stat().st_ino: entry.stat().st_size for entry in workspace.root.rglob("*") if entry.is_file()
    }
    assert sizes.apparent_bytes == sum(files.values())
    for each in sizes.entries:
        if each.kind not in ("record", "other"):
            assert disk_bytes([each]) == du(each.path)


def test_a_shared_file_is_counted_once_and_freed_with_its_last_name(workspace: Workspace) -> None:
    sizes = measure(workspace)
    first = next(each for each in sizes.of_kind("result") if each.stage == "calibrate")
    (points,) = sizes.of_kind("resume point")
    shared = (first.path / "part" / "weights.bin").stat()
    both = disk_bytes([first]) + disk_bytes([points])
    assert disk_bytes([first, points]) == both - shared.st_blocks * 512
    assert apparent_bytes([first, points]) == sum(map(apparent_bytes, ([first], [points]))) - shared.st_size
    assert freed_bytes([first]) == disk_bytes([first]) - shared.st_blocks * 512
    assert freed_bytes([first, points]) == disk_bytes([first, points])


def test_what_is_said_to_be_freed_is_freed(workspace: Workspace) -> None:
    removals = remove(workspace, lambda sizes: choose(sizes, Policy(unreachable=True), {}, now_s=0))
    assert {each.entry.kind for each in removals} == {"result", "resume point", "damaged"}
    before = du(workspace.root) + freed_bytes(each.entry for each in removals)
    kept = {each.kind for each in measure(workspace).entries}
    assert kept == {"kept", "in progress", "record", "other"}
    records = 4096 * 8  # seals and parts of the entries are not counted with them
    assert abs(before - du(workspace.root) - freed_bytes(each.entry for each in removals)) < records
    assert (workspace.root / "notes.txt").read_text() == "mine"


def test_records_without_their_entry_are_leftovers_once_they_are_old(workspace: Workspace) -> None:
    key = workspace.result_keys()[0]
    shutil.rmtree(workspace.root / "store" / key)
    (workspace.root / "runs").mkdir()
    (workspace.root / "runs" / "gone").write_text("/nowhere")
    (workspace.root / "parts" / ".x.json.abcd.tmp").write_text("half")

    def names() -> set[str]:
        return {each.path.name.partition("@")[0] for each in measure(workspace).of_kind("leftover")}

    assert names() == {"gone"}  # the others may be just before their entry
    for entry in [*(workspace.root / "seals").iterdir(), *(workspace.root / "parts").iterdir()]:
        state = entry.stat()
        os.utime(entry, (state.st_atime, state.st_mtime - 2 * GRACE_S))
    assert names() == {"gone", key, f"{key}.json", ".x.json.abcd.tmp"}


def test_the_last_use_of_a_result_is_marked_without_a_change_to_it(workspace: Workspace) -> None:
    key = workspace.result_keys()[0]
    path = workspace.root / "store" / key
    os.utime(path, (1000, 1000))
    digest = workspace.get(key).digest
    entry = next(each for each in measure(workspace).entries if each.key == key)
    assert entry.last_use_s == 1000
    workspace.mark_used(key)
    entry = next(each for each in measure(workspace).entries if each.key == key)
    assert entry.last_use_s > 1e9
    assert workspace.get(key).digest == digest
