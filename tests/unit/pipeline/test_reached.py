"""Which entries of a workspace runs reach: by their links and by their locks, wherever the runs are."""

import shutil
from pathlib import Path

import pytest

from compress.artifact.collection import Policy, choose, remove
from compress.artifact.workspace import Workspace
from compress.artifact.workspace_sizes import measure
from compress.pipeline import RunDir, reached, run_directories
from compress.pipeline.run_dir import LOCK_NAME
from tests.support.stored_run import STAGES, recipe_of, source_named, store_run


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.chdir(tmp_path)
    return Workspace(tmp_path / "w")


def found(workspace: Workspace) -> dict[str, tuple[str, ...]]:
    return reached(measure(workspace), run_directories(workspace.root, Path("runs")))


def test_every_result_that_a_run_links_is_reached(workspace: Workspace, tmp_path: Path) -> None:
    first = store_run(workspace, *recipe_of(), run=RunDir(tmp_path / "runs" / "a"))
    second = store_run(workspace, *recipe_of(seed=1), run=RunDir(tmp_path / "elsewhere" / "b"))
    loose = store_run(workspace, *recipe_of(seed=2))
    by_key = found(workspace)
    assert {by_key[parts.key] for parts, _ in first} == {("runs/a",)}
    assert {by_key[parts.key] for parts, _ in second} == {("elsewhere/b",)}
    assert not by_key.keys() & {parts.key for parts, _ in loose}
    removed = remove(workspace, lambda sizes: choose(sizes, Policy(unreachable=True), by_key, now_s=0))
    assert {each.entry.key for each in removed} == {parts.key for parts, _ in loose}


def test_a_run_of_an_older_program_is_found_in_the_directory_of_runs(
    workspace: Workspace, tmp_path: Path
) -> None:
    stored = store_run(workspace, *recipe_of(), run=RunDir(tmp_path / "runs" / "a"))
    shutil.rmtree(workspace.root / "runs")
    shutil.rmtree(workspace.root / "parts")
    assert found(workspace).keys() == {parts.key for parts, _ in stored}
    (tmp_path / "runs").rename("others")
    assert found(workspace) == {}


def test_a_result_of_a_run_that_another_one_shares_names_both(workspace: Workspace, tmp_path: Path) -> None:
    stored = store_run(workspace, *recipe_of(), run=RunDir(tmp_path / "runs" / "a"))
    stages = [*STAGES[:2], {**STAGES[2], "formats": "gptq"}]
    store_run(workspace, *recipe_of(stages), run=RunDir(tmp_path / "runs" / "b"))
    by_key = found(workspace)
    assert by_key[stored[0][0].key] == ("runs/a", "runs/b")
    assert by_key[stored[2][0].key] == ("runs/a",)


def test_the_unfinished_stage_of_an_interrupted_run_is_reached_by_its_lock(
    workspace: Workspace, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "runs" / "a")
    recipe, steps = recipe_of()
    other = Workspace(tmp_path / "other")
    (_, (parts, _), _) = store_run(other, recipe, steps)  # what the key of the second stage will be
    store_run(workspace, recipe, steps, run=run, until=1)
    workspace.describe_key(parts)
    (workspace.scratch(parts.key) / "layer-0").write_text("half")
    assert found(workspace)[parts.key] == ("runs/a",)
    lock = run.path / LOCK_NAME
    lock.write_text(lock.read_text().replace("W4A16_G128", "W8A16"))  # not as it was written
    assert parts.key not in found(workspace)
    store_run(workspace, *recipe_of([STAGES[0], {**STAGES[1], "scheme": "W8A16"}]), run=run, until=1)
    assert parts.key not in found(workspace)


def test_results_of_another_source_or_seed_are_not_taken_for_the_runs_own(
    workspace: Workspace, tmp_path: Path
) -> None:
    recipe, steps = recipe_of()
    store_run(workspace, recipe, steps, run=RunDir(tmp_path / "runs" / "a"))
    others = store_run(workspace, recipe, steps, source=source_named("b"))
    others += store_run(workspace, *recipe_of(seed=1))
    assert not found(workspace).keys() & {parts.key for parts, _ in others}


def test_another_kind_of_machine_is_reached_by_the_same_lock(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, steps = recipe_of()
    store_run(workspace, recipe, steps, run=RunDir(tmp_path / "runs" / "a"))
    monkeypatch.setattr("compress.pipeline.keys.arithmetic_class", lambda device: "other")
    others = store_run(workspace, recipe, steps)
    assert {parts.key for parts, _ in others} <= found(workspace).keys()


def test_a_run_that_is_gone_or_uses_another_workspace_reaches_nothing(
    workspace: Workspace, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "runs" / "a")
    store_run(workspace, *recipe_of(), run=run)
    run.link_workspace(tmp_path / "other")
    assert found(workspace) == {}
    run.link_workspace(workspace.root)
    assert len(found(workspace)) == 3
    shutil.rmtree(run.path)
    assert found(workspace) == {}
    assert [each.path.name[:2] for each in measure(workspace).of_kind("leftover")] == ["a-"]
