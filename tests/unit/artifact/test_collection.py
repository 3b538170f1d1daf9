"""What a collection takes: never what a run reaches, the least recently used first. A kill leaves no half
entry.
"""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.artifact import leftovers, workspace_sizes
from compress.artifact.collection import Policy, ago, choose, remove
from compress.artifact.manifest import verify_artifact
from compress.artifact.workspace import Workspace
from compress.artifact.workspace_sizes import Entry, Inode, WorkspaceSizes, disk_bytes, measure
from compress.errors import LockHeld
from tests.support.killed import Killed, killed_at
from tests.support.stored_run import recipe_of, store_entry, store_run

NOW_S = 1000.0
KINDS = ["result", "resume point", "kept", "damaged", "leftover", "in progress", "record", "other"]
REMOVED = {"result", "resume point", "kept", "damaged", "leftover"}


@st.composite
def workspaces(draw: st.DrawFn) -> tuple[WorkspaceSizes, dict[str, tuple[str, ...]]]:
    """Draw entries that share some inodes, and the keys that runs reach."""
    pool = [Inode(0, idx, 1, draw(st.integers(0, 9)), 1) for idx in range(12)]
    entries = []
    for idx, kind in enumerate(draw(st.lists(st.sampled_from(KINDS), max_size=9))):
        names = {pool[each]: 1 for each in draw(st.sets(st.integers(0, 11), max_size=3))}
        last_use_s = draw(st.integers(0, 1100))
        key = f"k{idx}" if kind in ("result", "resume point", "damaged") else None
        entries.append(Entry(kind, Path(str(idx)), last_use_s, names, key))  # type: ignore[arg-type]
    keys = [each.key for each in entries if each.key]
    reached = {key: ("run",) for key in keys if draw(st.booleans())}
    return WorkspaceSizes(Path("w"), tuple(entries)), reached


POLICIES = st.builds(
    Policy,
    older_than_s=st.none() | st.integers(0, 1100),
    keep_bytes=st.none() | st.integers(0, 60),
    unreachable=st.booleans(),
    include_reached=st.booleans(),
)


@given(workspaces(), POLICIES)
def test_a_policy_takes_what_it_names_and_nothing_that_a_run_reaches(
    held: tuple[WorkspaceSizes, dict[str, tuple[str, ...]]], policy: Policy
) -> None:
    sizes, reached = held
    chosen = choose(sizes, policy, reached, now_s=NOW_S)
    gone = [each.entry for each in chosen]
    assert len({each.path for each in gone}) == len(gone)
    assert {each.kind for each in gone} <= REMOVED
    assert {each.path for each in sizes.of_kind("leftover")} <= {each.path for each in gone}

    def is_reached(each: Entry) -> bool:
        return each.kind in ("result", "resume point") and each.key in reached

    if not policy.include_reached:
        assert not any(is_reached(each) for each in gone)
    left = [each for each in sizes.entries if each.path not in {other.path for other in gone}]
    may_go = [each for each in left if each.kind in REMOVED]
    may_go = [each for each in may_go if policy.include_reached or not is_reached(each)]
    if policy.older_than_s is not None:
        assert all(NOW_S - each.last_use_s <= policy.older_than_s for each in may_go)
    if policy.unreachable:
        assert all(each.kind == "kept" or is_reached(each) for each in may_go)
    if policy.keep_bytes is not None:
        assert disk_bytes(left) <= policy.keep_bytes or not may_go
        by_size = [each.entry for each in chosen if "over the limit" in each.reason]
        assert [each.last_use_s for each in by_size] == sorted(each.last_use_s for each in by_size)
        assert all(other.last_use_s <= each.last_use_s for other in by_size for each in may_go)
        if by_size:  # one less would not have been enough
            assert disk_bytes([*left, by_size[-1]]) > policy.keep_bytes
    else:
        assert all("over the limit" not in each.reason for each in chosen)
    if policy == Policy(include_reached=policy.include_reached):
        assert {each.kind for each in gone} <= {"leftover"}


def test_an_age_is_told_in_its_largest_unit() -> None:
    assert [ago(each) for each in (5, 60, 7200, 90000, 1e6)] == [
        "just now", "1 minute ago", "2 hours ago", "1 day ago", "11 days ago",
    ]  # fmt: skip


def test_a_run_keeps_the_collection_out(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    store_run(workspace, *recipe_of())
    with workspace.lock(), pytest.raises(LockHeld):
        remove(workspace, lambda sizes: pytest.fail("chose without the lock"))
    assert len(workspace.result_keys()) == 3


def test_a_kill_between_any_two_file_operations_leaves_every_entry_whole_or_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each kill a run finds or builds every entry, and the next collection leaves nothing."""
    monkeypatch.setattr(workspace_sizes, "GRACE_S", -1.0)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # what was written stays, here
    policy = Policy(unreachable=True)
    whole = Workspace(tmp_path / "whole")
    stored = store_run(whole, *recipe_of(), until=2)
    (whole.scratch(stored[1][0].key) / "point").write_text("one")
    num_killed = 0
    for call in range(200):
        workspace = Workspace(tmp_path / str(call))
        shutil.copytree(whole.root, workspace.root)
        with killed_at(call) as count:
            try:
                remove(workspace, lambda sizes: choose(sizes, policy, {}, now_s=NOW_S))
                finished = True
            except Killed:
                finished = False
        again = Workspace(workspace.root)
        for parts, artifact in stored:
            assert again.damage(parts.key) is None
            if (found := again.get(parts.key)) is not None:
                assert found.digest == artifact.digest
        if finished:
            break
        num_killed += 1
        assert count[0] > call
        parts, artifact = stored[call % 2]
        assert store_entry(again, parts, artifact.manifest.provenance["parents"]).digest == artifact.digest
        verify_artifact(again.get(parts.key))
        with monkeypatch.context() as patch:  # the killed process is this one
            patch.setattr(leftovers, "is_running", lambda name: False)
            remove(again, lambda sizes: choose(sizes, policy, {}, now_s=NOW_S))
        assert {each.kind for each in measure(again).entries} == {"record"}
        assert not list((again.root / "seals").iterdir())
        assert not list((again.root / "parts").iterdir())
        assert not list((again.root / "tmp").iterdir())
        shutil.rmtree(workspace.root)
    assert num_killed >= 20
