"""The entries of a workspace that runs reach: those that a run directory links, and those that its lock file
would find again, unfinished stages among them.

A lock names stages with every setting. An entry matches where its key has the stage, the settings and the
seed of one of them, and its inputs are results that the same run reaches.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from compress.artifact.workspace import Workspace
from compress.artifact.workspace_sizes import Entry, WorkspaceSizes
from compress.digest import canonical_json
from compress.errors import CompressError
from compress.pipeline.run_dir import LOCK_NAME, RunDir
from compress.recipe import read_source, read_yaml

_SOURCE = "source"


def run_directories(root: Path, beside: Path) -> list[RunDir]:
    """Return the run directories that use a workspace: those that registered there, and those in a directory
    of runs that link it.
    """
    registered = Workspace(root).registered_runs()
    near = sorted(beside.iterdir()) if beside.is_dir() else []
    home = root.resolve()
    found = {path.resolve() for path in (*registered, *near) if (path / "workspace").resolve() == home}
    return [RunDir(_near(path)) for path in sorted(found)]


def _near(path: Path) -> Path:
    """Return a path below the current directory relative to that, any other as it is."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def reached(sizes: WorkspaceSizes, runs: Iterable[RunDir]) -> dict[str, tuple[str, ...]]:
    """Return the keys that runs reach, each with the paths of these runs."""
    found: dict[str, tuple[str, ...]] = {}
    for run in runs:
        for key in _reached_by(run, sizes):
            found[key] = (*found.get(key, ()), str(run.path))
    return found


def _reached_by(run: RunDir, sizes: WorkspaceSizes) -> set[str]:
    entries = [each for each in sizes.of_kind("result", "resume point") if each.key is not None]
    linked = run.linked(sizes.root)
    taken = [each for each in entries if each.key in linked]
    sources = {each.parts.inputs.get(_SOURCE) for each in taken if each.parts is not None}
    stages = _stages_of(run)
    left = [each for each in entries if each.key not in linked and each.parts is not None]
    while matching := [each for each in left if _matches(each, stages, taken, sources)]:
        taken += matching
        left = [each for each in left if each not in matching]
    return linked | {str(each.key) for each in taken}


def _matches(entry: Entry, stages: set[bytes], taken: list[Entry], sources: set[str | None]) -> bool:
    """Return whether a lock with these stages finds an entry, after the entries that it took before."""
    parts = entry.parts
    if parts is None or _identity(parts.stage, parts.spec, parts.seed) not in stages:
        return False
    source = parts.inputs.get(_SOURCE)
    if sources and source not in sources:
        return False
    digests = {each.digest for each in taken} | {source}
    return all(digest in digests for digest in parts.inputs.values())


def _stages_of(run: RunDir) -> set[bytes]:
    """Return the identities of the stages in a run's lock; none where it has no lock as a run wrote it."""
    try:
        run.check_lock()
        text = read_source(run.lock, file=str(run.lock), what=LOCK_NAME, hint="Run the recipe again.")
        tree, _ = read_yaml(text, file=str(run.lock))
    except (CompressError, OSError):
        return set()
    seed = tree["seed"]
    return {
        _identity(raw["kind"], {name: each for name, each in raw.items() if name != "kind"}, seed)
        for raw in tree["stages"]
    }


def _identity(stage: str, spec: Mapping[str, Any], seed: int) -> bytes:
    """Return the bytes that equal settings of a stage have in common."""
    return canonical_json([stage, spec, seed])
