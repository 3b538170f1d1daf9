"""What `plan` tells of each stage: where a run finds it, or why it must be built."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compress.artifact.workspace import Workspace
from compress.context import SilentProgress
from compress.pipeline import Lookup, lookups
from compress.pipeline.lookup import WORKSPACE
from compress.registry.stage_cache import StageCache
from tests.support.stored_run import STAGES, recipe_of, source_named, store_run


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "w")


def plan(workspace: Workspace, *args: Any, source: str = "a", **options: Any) -> list[Lookup]:
    recipe, steps = recipe_of(*args)
    return lookups(recipe, steps, source_named(source), workspace, "cpu", **options)


def changed(idx: int, **settings: Any) -> list[dict[str, Any]]:
    return [{**each, **settings} if at == idx else each for at, each in enumerate(STAGES)]


def test_an_empty_workspace_misses_every_stage_for_certain(workspace: Workspace) -> None:
    found = plan(workspace)
    assert [(each.cached, each.reason) for each in found] == [(False, "no entry of this stage")] * 3
    assert not workspace.root.exists()


def test_stored_results_are_hits(workspace: Workspace) -> None:
    stored = store_run(workspace, *recipe_of())
    keys = [parts.key for parts, _ in stored]
    assert plan(workspace) == [Lookup(True, WORKSPACE, key=key) for key in keys]


def test_a_changed_setting_is_named_and_what_follows_is_unknown(workspace: Workspace) -> None:
    store_run(workspace, *recipe_of())
    first, second, third = plan(workspace, changed(0, num_samples=8))
    assert (first.cached, first.reason) == (False, "differs from the nearest entry in num_samples (8, was 4)")
    assert (second.cached, second.reason) == (None, "unknown until 'calibrate' is built")
    assert (third.cached, third.reason) == (None, "unknown until 'quantize' is built")
    first, second, third = plan(workspace, changed(1, scheme="W8A16"))
    assert first.cached
    assert second.reason == "differs from the nearest entry in scheme (W8A16, was W4A16_G128)"
    assert third.cached is None


def test_a_stage_that_no_digest_could_make_a_hit_is_a_miss_though_its_input_is_unknown(
    workspace: Workspace,
) -> None:
    store_run(workspace, *recipe_of())
    stages = changed(0, num_samples=8)
    stages[1] = {**stages[1], "scheme": "W8A16"}
    _, second, _ = plan(workspace, stages)
    assert second.cached is False
    assert second.reason == "differs from the nearest entry in scheme (W8A16, was W4A16_G128)"


def test_source_seed_and_version_are_reasons(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, steps = recipe_of()
    store_run(workspace, recipe, steps)
    assert plan(workspace, source="b")[0].reason == "differs from the nearest entry in input source"
    (first, *_) = lookups(replace(recipe, seed=5), steps, source_named(), workspace, "cpu")
    assert first.reason == "differs from the nearest entry in seed (5, was 0)"
    stage = replace(steps[0].stage, version=steps[0].stage.version + 1)
    newer = [replace(steps[0], stage=stage), *steps[1:]]
    (first, *_) = lookups(recipe, newer, source_named(), workspace, "cpu")
    assert (
        first.reason
        == f"differs from the nearest entry in stage version ({stage.version}, was {stage.version - 1})"
    )
    monkeypatch.setattr("compress.pipeline.keys.arithmetic_class", lambda device: "other")
    assert plan(workspace)[0].reason.startswith(
        "differs from the nearest entry in kind of machine (other, was "
    )


def test_the_nearest_of_several_entries_explains_a_miss(workspace: Workspace) -> None:
    store_run(workspace, *recipe_of(changed(0, num_samples=16, seq_len=64)))
    store_run(workspace, *recipe_of())
    first = plan(workspace, changed(0, num_samples=16))[0]
    assert first.reason in (
        "differs from the nearest entry in num_samples (16, was 4)",
        "differs from the nearest entry in seq_len (32, was 64)",
    )


def test_a_damaged_entry_is_the_reason(workspace: Workspace) -> None:
    _, (_, artifact), _ = store_run(workspace, *recipe_of())
    (artifact.path / "config.json").write_text("{}")
    first, second, third = plan(Workspace(workspace.root))
    assert first.cached
    assert second.cached is False
    assert "config.json has changed" in str(second.reason)
    assert (third.cached, third.reason) == (None, "unknown until 'quantize' is built")


def test_an_entry_without_stored_parts_is_still_a_hit_and_explains_nothing(workspace: Workspace) -> None:
    store_run(workspace, *recipe_of())
    shutil.rmtree(workspace.root / "parts")
    assert [each.cached for each in plan(workspace)] == [True] * 3
    assert plan(workspace, changed(0, num_samples=8))[0].reason == "no entry of this stage"


def test_a_hit_in_a_cache_gives_the_digest_for_the_next_key(workspace: Workspace, tmp_path: Path) -> None:
    """Nothing is pulled; the second stage is found in the cache, the third nowhere."""
    cache = StageCache(f"layout://{tmp_path}/registry/stages")
    (first, second, third) = plan(workspace, cache=cache)
    assert "has nothing yet" in str(first.reason)
    assert second.cached is third.cached is False
    for parts, artifact in store_run(Workspace(tmp_path / "other"), *recipe_of())[:2]:
        cache.store(parts, artifact, progress=SilentProgress())
    (first, second, third) = plan(workspace, cache=cache)
    assert (first.cached, first.found_in) == (True, str(cache))
    assert (second.cached, second.found_in) == (True, str(cache))
    assert (third.cached, third.reason) == (False, f"no entry of this stage; not in {cache}")
    assert workspace.result_keys() == []
    (first, second, _) = plan(workspace, changed(0, num_samples=8), cache=cache)
    assert first.reason == f"no entry of this stage; not in {cache}"
    assert second.cached is None  # the cache may have it
