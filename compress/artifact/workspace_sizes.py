"""The sizes of what a workspace holds, by entry: finished results, resume points, kept results, what was set
aside, and what killed processes left.

A file that several names lead to (hard links) is counted once. Sizes are apparent (lengths of files) and on
disk (allocated blocks, directories included), so that the total is that of `du`. Links are not followed.
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from compress.artifact.key_parts import KeyParts
from compress.artifact.leftovers import is_abandoned
from compress.artifact.manifest import Manifest, open_artifact
from compress.artifact.seal import SEALS, STORE
from compress.artifact.workspace import PARTS, RUNS, Workspace
from compress.errors import CompressError

Kind = Literal["result", "resume point", "kept", "damaged", "in progress", "leftover", "record", "other"]
GRACE_S = 60.0
"""Age of a record without its entry that counts as left: a result gets its seal just before its place."""
_BLOCK_BYTES = 512
_HOLDERS = "holders"
_LOCKS = ("lock", "locks")
_TREES: Mapping[str, Kind] = {
    STORE: "result",
    "scratch": "resume point",
    "kept": "kept",
    "damaged": "damaged",
}


@dataclass(frozen=True)
class Inode:
    """One file or directory on the disk; `num_links` counts its names anywhere."""

    device: int
    number: int
    apparent_bytes: int = field(compare=False)
    disk_bytes: int = field(compare=False)
    num_links: int = field(compare=False)


@dataclass(frozen=True)
class Entry:
    """One thing in a workspace, which is kept or removed whole. `key`, `stage` and `role` are None where it
    is no result of a stage, or its description is gone; `names` counts the names of each inode in it.
    """

    kind: Kind
    path: Path
    last_use_s: float
    names: Mapping[Inode, int]
    key: str | None = None
    stage: str | None = None
    role: str | None = None
    parts: KeyParts | None = None
    digest: str | None = None


@dataclass(frozen=True)
class WorkspaceSizes:
    """All entries of a workspace."""

    root: Path
    entries: tuple[Entry, ...]

    def of_kind(self, *kinds: Kind) -> list[Entry]:
        """Return the entries of some kinds."""
        return [each for each in self.entries if each.kind in kinds]

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk of everything."""
        return disk_bytes(self.entries)

    @property
    def apparent_bytes(self) -> int:
        """The sum of the lengths of all files."""
        return apparent_bytes(self.entries)


def disk_bytes(entries: Iterable[Entry]) -> int:
    """Return the bytes on disk of some entries; what they share is counted once."""
    return sum(inode.disk_bytes for inode in {inode for each in entries for inode in each.names})


def apparent_bytes(entries: Iterable[Entry]) -> int:
    """Return the lengths of the files of some entries; what they share is counted once."""
    return sum(inode.apparent_bytes for inode in {inode for each in entries for inode in each.names})


def freed_bytes(entries: Iterable[Entry]) -> int:
    """Return the bytes that the disk gets back once some entries are gone: a file that has a name elsewhere
    stays.
    """
    removed: Counter[Inode] = Counter()
    for each in entries:
        removed.update(each.names)
    return sum(inode.disk_bytes for inode, count in removed.items() if count >= inode.num_links)


def measure(workspace: Workspace) -> WorkspaceSizes:
    """Return what a workspace holds; what comes or goes meanwhile may be missing."""
    root = workspace.root
    entries: list[Entry] = []
    records: dict[Inode, int] = {}
    _add(records, root)
    for child in _children(root):
        if child.name in _TREES and child.is_dir() and not child.is_symlink():
            _add(records, child)
            entries += (_described(workspace, _TREES[child.name], each) for each in _children(child))
        elif child.name == "tmp":
            _add(records, child)
            entries += (_entry(_kind_of_temporary(each), each) for each in _children(child))
        elif child.name in (SEALS, PARTS, RUNS, _HOLDERS):
            _add(records, child)
            for each in _children(child):
                if _is_left(workspace, each):
                    entries.append(_entry("leftover", each))
                else:
                    _add(records, each)
        elif child.name in _LOCKS:
            _add(records, child)
            for each in _children(child):
                _add(records, each)
        else:
            entries.append(_entry("leftover" if _is_temporary_file(child) else "other", child))
    entries.append(Entry("record", root, _time_of(root), records))
    return WorkspaceSizes(root, tuple(entries))


def _described(workspace: Workspace, kind: Kind, path: Path) -> Entry:
    """Return an entry of a directory of entries, with what its manifest and the parts of its key state."""
    if _is_temporary_file(path):
        return _entry("leftover", path)
    if kind == "kept":
        return _entry(kind, path)
    if kind == "resume point" and (workspace.root / STORE / path.name).is_dir():
        kind = "leftover"  # killed after the result had its place
    stage = role = digest = None
    parts = None
    with contextlib.suppress(ValueError):  # not the name of a key
        parts = workspace.parts_of(path.name)
        stage = None if parts is None else parts.stage
    manifest = _manifest(path) if kind in ("result", "damaged") else None
    if manifest is not None:
        stage = str(manifest.provenance.get("stage") or "") or stage
        role = manifest.role
        digest = manifest.digest
    return _entry(kind, path, key=path.name, stage=stage, role=role, parts=parts, digest=digest)


def _manifest(path: Path) -> Manifest | None:
    try:
        return open_artifact(path).manifest
    except (CompressError, OSError):
        return None


def _entry(
    kind: Kind,
    path: Path,
    *,
    key: str | None = None,
    stage: str | None = None,
    role: str | None = None,
    parts: KeyParts | None = None,
    digest: str | None = None,
) -> Entry:
    names: dict[Inode, int] = {}
    newest_s = _time_of(path)
    _add(names, path)
    if path.is_dir() and not path.is_symlink():
        for directory, directories, files in os.walk(path):
            for name in (*directories, *files):
                inside = Path(directory) / name
                _add(names, inside)
                if kind != "result":  # its directory has the time of last use
                    newest_s = max(newest_s, _time_of(inside))
    return Entry(kind, path, newest_s, names, key, stage, role, parts, digest)


def _add(names: dict[Inode, int], path: Path) -> None:
    """Count one name of a file or directory."""
    with contextlib.suppress(FileNotFoundError):
        state = path.lstat()
        is_directory = path.is_dir() and not path.is_symlink()
        inode = Inode(
            state.st_dev,
            state.st_ino,
            0 if is_directory else state.st_size,
            state.st_blocks * _BLOCK_BYTES,
            1 if is_directory else state.st_nlink,
        )
        names[inode] = names.get(inode, 0) + 1


def _time_of(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def _children(directory: Path) -> Iterator[Path]:
    try:
        yield from sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return


def _kind_of_temporary(path: Path) -> Kind:
    return "leftover" if is_abandoned(path, path.name) else "in progress"


def _is_temporary_file(path: Path) -> bool:
    """Return whether a file is one that a write was replacing another by when it was killed."""
    return path.name.startswith(".") and path.name.endswith(".tmp") and _is_old(path)


def _is_left(workspace: Workspace, record: Path) -> bool:
    """Return whether a seal, the parts of a key, the path of a run or the name of a process outlived what it
    is of.
    """
    if record.name.startswith("."):
        return _is_temporary_file(record)
    if record.parent.name == RUNS:
        return workspace.registered_run(record) is None
    if record.parent.name == _HOLDERS:
        return is_abandoned(record, record.name)
    places = [workspace.root / STORE / record.name.partition("@")[0]]
    if record.parent.name == PARTS:
        key = record.name.removesuffix(".json")
        places = [workspace.root / tree / key for tree in (STORE, "scratch", "damaged")]
    return not any(os.path.lexists(place) for place in places) and _is_old(record)


def _is_old(path: Path) -> bool:
    return time.time() - _time_of(path) > GRACE_S
