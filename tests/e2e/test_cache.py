"""A second machine builds nothing that the first one built; a cache that fails costs time and no more."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compress.artifact.manifest import MANIFEST_NAME
from compress.artifact.workspace import Workspace
from compress.registry.protocol import open_registry
from compress.stages import STAGES
from tests.support import oci_server

Recipe = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
SHORT = [
    {"kind": "calibrate", "num_samples": 2, "seq_len": 16},
    {"kind": "quantize", "scheme": "W8A16", "round": {"kind": "rtn", "scale": "min_max"}},
    {"kind": "export"},
]
LAYOUT = "layout://registry/stages"


@pytest.fixture
def oci(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> oci_server.Oci:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    for module in ("resuming", "upload"):
        monkeypatch.setattr(f"compress.registry.{module}.PAUSES_S", (0.0,))
    return oci_server.Oci()


@pytest.fixture(params=["layout", "oci"])
def cache(request: pytest.FixtureRequest, oci: oci_server.Oci) -> str:
    return LAYOUT if request.param == "layout" else f"oci+http://{oci_server.start(oci)}/org/stages"


def outcome(command: Command, *words: object) -> tuple[dict[str, Any], str]:
    """Return the document of a command that succeeds, and what it told on stderr."""
    code, out, err = command(*words, "--json")
    assert code == 0, err
    return json.loads(out), err


def facts(document: dict[str, Any], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(each[name] for name in names) for each in document["stages"]]


@pytest.mark.one_in(8)
def test_a_second_workspace_builds_nothing(
    cache: str, recipe: Recipe, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe(stages=SHORT, cache={"from": cache, "to": cache})
    first, err = outcome(command, "run", path, "--workspace", "first")
    assert facts(first, "cached", "pulled") == [(False, False)] * 3
    assert "warning" not in err
    plan, _ = outcome(command, "plan", path, "--workspace", "second")
    assert facts(plan, "cached", "found_in", "reason") == [(True, cache, None)] * 3
    for kind, stage in STAGES.items():
        monkeypatch.setitem(STAGES._members, kind, replace(stage, run=lambda *given: pytest.fail("built")))
    second, err = outcome(command, "run", path, "--workspace", "second", "--run-dir", "runs/second")
    assert facts(second, "cached", "pulled") == [(True, True)] * 3
    assert facts(second, "digest") == facts(first, "digest")
    assert "warning" not in err
    provenance = Path("first").parent / "runs" / "second" / "recipe.lock.yaml"
    assert cache in provenance.read_text()
    third, _ = outcome(command, "run", path, "--workspace", "second")
    assert facts(third, "cached", "pulled") == [(True, False)] * 3
    plan, _ = outcome(command, "plan", path, "--workspace", "second")
    assert facts(plan, "cached", "found_in") == [(True, "workspace")] * 3
    _, out, _ = command("plan", path, "--workspace", "third")
    assert out.count(f"in {cache}") == 3


@pytest.mark.slow
def test_a_cache_that_cannot_be_reached_or_was_tampered_with_is_a_warning(
    oci: oci_server.Oci, recipe: Recipe, command: Command
) -> None:
    place = f"oci+http://{oci_server.start(oci)}/org/stages"
    first, _ = outcome(command, "run", recipe(stages=SHORT, cache={"to": place}), "--workspace", "first")
    path = recipe(stages=SHORT, cache={"from": place})
    oci.tamper = lambda name, data: b"\0" + data[1:] if "/blobs/" in name and len(data) > 10000 else data
    second, err = outcome(command, "run", path, "--workspace", "second")
    assert facts(second, "digest") == facts(first, "digest")
    assert facts(second, "pulled") == [(True,), (False,), (False,)]
    for kind in ("quantize", "export"):
        assert f"'{kind}' is built, because its entry in {place} cannot be used" in err
    oci.tamper = lambda name, data: data
    path = recipe(stages=SHORT, cache={"from": "oci+http://127.0.0.1:9/org/stages"})
    third, err = outcome(command, "run", path, "--workspace", "third", "--until", "calibrate")
    assert facts(third, "digest") == facts(first, "digest")[:1]
    assert err.count("the cache oci+http://127.0.0.1:9/org/stages is not used in this run") == 1
    plan, _ = outcome(command, "plan", path, "--workspace", "fourth")
    assert "cannot be read" in plan["stages"][0]["reason"]
    code, _, err = command("run", recipe(stages=SHORT, cache={"from": "oci://host"}))
    assert (code, "cache.from" in err) == (2, True)
    code, _, err = command("run", recipe(stages=SHORT, cache={"form": place}))
    assert (code, "Did you mean 'from'" in err) == (2, True)


def test_a_newer_version_of_a_stage_is_built_and_not_pulled(
    recipe: Recipe, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe(stages=SHORT[:1], cache={"from": LAYOUT, "to": LAYOUT})
    outcome(command, "run", path, "--workspace", "first")
    stage = STAGES.get("calibrate")
    newer = replace(stage, version=stage.version + 1)
    monkeypatch.setitem(STAGES._members, "calibrate", newer)
    plan, _ = outcome(command, "plan", path, "--workspace", "first")
    version = f"stage version ({newer.version}, was {stage.version})"
    assert plan["stages"][0]["reason"] == f"differs from the nearest entry in {version}; not in {LAYOUT}"
    second, _ = outcome(command, "run", path, "--workspace", "second")
    assert facts(second, "cached", "pulled") == [(False, False)]
    tags = open_registry("layout://registry").repository("stages").tags()
    assert len({each.manifest.digest for each in tags}) == 2
    rebuilt, _ = outcome(command, "run", path, "--workspace", "second", "--from", "calibrate")
    assert facts(rebuilt, "cached", "pulled") == [(False, False)]


def test_entries_are_exported_imported_measured_and_collected(
    recipe: Recipe, command: Command, work: Path
) -> None:
    path = recipe(stages=SHORT)
    first, _ = outcome(command, "run", path)
    exported, _ = outcome(command, "export-cache", LAYOUT, "--recipe", path)
    assert (len(exported["copied"]), exported["refused"]) == (3, [])
    imported, _ = outcome(command, "import-cache", LAYOUT, "--workspace", "second")
    assert sorted(imported["copied"]) == sorted(exported["copied"])
    second, _ = outcome(command, "run", path, "--workspace", "second", "--run-dir", "elsewhere")
    assert facts(second, "cached", "pulled", "digest") == [
        (True, False, digest) for (digest,) in facts(first, "digest")
    ]
    registry = sorted(each for each in (work / "registry").rglob("*"))
    sizes, _ = outcome(command, "du")
    assert {(each["stage"], each["runs"][0]) for each in sizes["entries"]} == {
        (kind, "runs/recipe") for kind in ("calibrate", "quantize", "export")
    }
    assert {each["role"] for each in sizes["entries"]} == {"calibration", "quantized", "checkpoint"}
    nothing, _ = outcome(command, "gc", "--older-than", "0m", "--keep-bytes", "0", "--unreachable", "--yes")
    assert nothing["entries"] == []
    assert nothing["over_limit_bytes"] > 0
    os.utime(next((work / "second" / "store").iterdir()), (0, 0))
    shown, _ = outcome(command, "gc", "--workspace", "second", "--older-than", "30d", "--include-reached")
    assert [each["reason"][:9] for each in shown["entries"]] == ["last used"]
    assert len(Workspace(Path("second")).result_keys()) == 3
    with Workspace(Path("second")).lock():
        assert command("gc", "--workspace", "second", "--yes")[0] == 75
        assert command("import-cache", LAYOUT, "--workspace", "second")[0] == 75
    (work / "elsewhere" / "workspace").unlink()
    gone, _ = outcome(command, "gc", "--workspace", "second", "--unreachable", "--yes")
    assert len(gone["entries"]) == 3
    assert Workspace(Path("second")).result_keys() == []
    assert sorted(each for each in (work / "registry").rglob("*")) == registry
    again, _ = outcome(command, "run", path, "--workspace", "second", "--run-dir", "elsewhere")
    assert facts(again, "digest") == facts(first, "digest")
    for words in (["--older-than", "30"], ["--keep-bytes", "much"], ["--workspace", "nowhere"]):
        assert command("gc", *words)[0] == 2


def test_a_refused_entry_ends_an_import_with_the_code_of_storage(
    recipe: Recipe, command: Command, work: Path
) -> None:
    outcome(command, "run", recipe(stages=SHORT[:1], cache={"to": LAYOUT}))
    artifact = (work / "runs" / "recipe" / "artifacts" / "calibrate").resolve()
    manifest = json.loads((artifact / MANIFEST_NAME).read_text())
    blob = work / "registry" / "blobs" / "sha256" / manifest["files"][0]["digest"].removeprefix("sha256:")
    blob.write_bytes(b"other")
    code, out, err = command("import-cache", LAYOUT, "--workspace", "second", "--json")
    assert code == 5, err
    document = json.loads(out)
    assert (document["copied"], len(document["refused"])) == ([], 1)
    assert document["error"]["kind"] == "StorageError"
    assert Workspace(Path("second")).result_keys() == []
    assert command("export-cache", "hf://owner/stages")[0] == 2
