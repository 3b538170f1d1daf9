"""Entries to and from a cache: all of a workspace, or those of one recipe; whole or not at all."""

import os
from pathlib import Path

import pytest

from compress.artifact import leftovers
from compress.artifact.key_parts import KeyParts
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from compress.context import SilentProgress
from compress.errors import Interrupted
from compress.pipeline.cache import RunCache, opened
from compress.pipeline.exchange import Wanted, export_entries, import_entries
from compress.registry.protocol import open_registry
from compress.registry.stage_cache import StageCache
from tests.support.killed import Killed, killed_at
from tests.support.stored_run import STAGES, recipe_of, source_named, store_run

SILENT = SilentProgress()


@pytest.fixture
def cache(tmp_path: Path) -> StageCache:
    return StageCache(f"layout://{tmp_path}/registry/stages")


def test_a_second_workspace_gets_what_the_first_one_has(cache: StageCache, tmp_path: Path) -> None:
    first = Workspace(tmp_path / "first")
    second = Workspace(tmp_path / "second")
    stored = store_run(first, *recipe_of())
    keys = {parts.key for parts, _ in stored}
    out = export_entries(first, cache, SILENT)
    assert (set(out.copied), out.present, out.refused) == (keys, [], {})
    assert out.size_bytes == sum(artifact.size_bytes for _, artifact in stored)
    assert set(export_entries(first, cache, SILENT).present) == keys
    back = import_entries(second, cache, SILENT)
    assert (set(back.copied), back.present, back.refused) == (keys, [], {})
    for parts, artifact in stored:
        assert second.get(parts.key).digest == artifact.digest
    again = import_entries(second, cache, SILENT)
    assert (again.copied, set(again.present)) == ([], keys)


def test_a_recipe_gets_its_own_stages_only(cache: StageCache, tmp_path: Path) -> None:
    first = Workspace(tmp_path / "first")
    recipe, steps = recipe_of()
    stored = store_run(first, recipe, steps)
    store_run(first, *recipe_of(seed=1))
    wanted = Wanted(recipe, steps, source_named(), "cpu")
    assert export_entries(first, cache, SILENT, wanted=wanted).copied == [parts.key for parts, _ in stored]
    found = import_entries(Workspace(tmp_path / "second"), cache, SILENT, wanted=wanted)
    assert found.copied == [parts.key for parts, _ in stored]
    stages = [STAGES[0], {**STAGES[1], "scheme": "W8A16"}, STAGES[2]]
    other = Wanted(*recipe_of(stages), source_named(), "cpu")
    found = import_entries(Workspace(tmp_path / "third"), cache, SILENT, wanted=other)
    assert (found.copied, found.missing) == ([stored[0][0].key], ["quantize", "export"])


def test_what_is_damaged_or_not_described_is_not_exported(cache: StageCache, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "first")
    (first, _), (second, artifact), (third, _) = store_run(workspace, *recipe_of())
    (artifact.path / "config.json").write_text("{}")
    (workspace.root / "parts" / f"{third.key}.json").unlink()
    found = export_entries(Workspace(workspace.root), cache, SILENT)
    assert found.copied == [first.key]
    assert found.refused.keys() == {second.key, third.key}
    assert "has changed" in found.refused[second.key]


def test_one_entry_that_was_tampered_with_does_not_keep_the_others_out(
    cache: StageCache, tmp_path: Path
) -> None:
    stored = store_run(Workspace(tmp_path / "first"), *recipe_of())
    export_entries(Workspace(tmp_path / "first"), cache, SILENT)
    (first, _), (second, _), (third, _) = stored
    registry = open_registry(f"layout://{tmp_path}/registry")
    registry.write_tag("stages", [second.key], cache.look_up(first.key))
    found = import_entries(Workspace(tmp_path / "second"), cache, SILENT)
    assert set(found.copied) == {first.key, third.key}
    assert found.refused.keys() == {second.key}


def test_an_import_that_is_killed_anywhere_leaves_entries_whole_or_not_there(
    cache: StageCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    stored = store_run(Workspace(tmp_path / "first"), *recipe_of(), until=2)
    export_entries(Workspace(tmp_path / "first"), cache, SILENT)
    num_killed = 0
    for call in range(100):
        place = tmp_path / str(call)
        with killed_at(call):
            try:
                import_entries(Workspace(place), cache, SILENT)
                break
            except Killed:
                num_killed += 1
        again = Workspace(place)
        for parts, artifact in stored:
            assert again.damage(parts.key) is None
            if (found := again.get(parts.key)) is not None:
                assert found.digest == artifact.digest
        with monkeypatch.context() as patch:  # the killed process is this one
            patch.setattr(leftovers, "is_running", lambda name: False)
            with again.lock():
                found = import_entries(again, cache, SILENT)
        assert not found.refused
        assert {parts.key for parts, _ in stored} == set(again.result_keys())
        assert not list((place / "tmp").iterdir())
    assert num_killed >= 10


def test_a_run_stops_in_the_middle_of_a_transfer(cache: StageCache, tmp_path: Path) -> None:
    """A signal is seen at the next MiB; nothing of the entry is stored."""
    parts = KeyParts("export", 1, {}, {}, 0)

    def build(writer: ArtifactWriter) -> None:
        (writer.path / "weights.bin").write_bytes(bytes(3 << 20))
        writer.describe(role="checkpoint")

    artifact = Workspace(tmp_path / "first").commit(parts.key, parts.stage, {}, build)
    cache.store(parts, artifact, progress=SILENT)
    second = Workspace(tmp_path / "second")
    told: list[str] = []
    for signal, code in ((15, 143), (2, 130)):
        run = RunCache(cache, None, warn=told.append, stop_signal=lambda signal=signal: signal)
        with pytest.raises(Interrupted) as raised:
            run.pull(parts, second, SILENT)
        assert raised.value.exit_code == code
    assert (second.result_keys(), list((second.root / "tmp").iterdir()), told) == ([], [], [])
    assert RunCache(cache, None).pull(parts, second, SILENT).digest == artifact.digest


def test_a_cache_that_cannot_be_used_is_warned_of_once(tmp_path: Path) -> None:
    told: list[str] = []
    assert opened(None, offline=True, warn=told.append) is None
    assert opened("oci://example.invalid/a/b", offline=True, warn=told.append) is None
    assert told == ["the cache oci://example.invalid/a/b is not used offline."]
    assert opened(f"layout://{tmp_path}/r/stages", offline=True, warn=told.append) is not None
    run = RunCache(StageCache(f"layout://{tmp_path}/r/stages"), None, warn=told.append)
    stored = store_run(Workspace(tmp_path / "first"), *recipe_of())
    for parts, _ in stored:
        assert run.pull(parts, Workspace(tmp_path / "second"), SILENT) is None
    assert len(told) == 2
    assert "no registry" in told[1]


def test_a_run_that_makes_its_cache_is_not_warned_of_it(tmp_path: Path) -> None:
    told: list[str] = []
    place = StageCache(f"layout://{tmp_path}/r/stages")
    run = RunCache(place, place, warn=told.append)
    stored = store_run(Workspace(tmp_path / "first"), *recipe_of())
    for parts, artifact in stored:
        assert run.pull(parts, Workspace(tmp_path / "second"), SILENT) is None
        run.push(parts, artifact, SILENT)
    assert told == []
    assert set(place.entry_keys()) == {parts.key for parts, _ in stored}
