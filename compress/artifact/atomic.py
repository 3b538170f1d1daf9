"""Files that are either wholly there or not there at all, also after a power cut: temporary name, fsync,
rename, fsync of the directory.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from compress.artifact.disk import FULL


@contextlib.contextmanager
def atomic_file(path: Path, *, temporary_directory: Path | None = None) -> Iterator[BinaryIO]:
    """Open a stream whose content appears at `path` when the block ends; after an error `path` is unchanged.

    A kill leaves a `.tmp` file next to `path`, or in `temporary_directory`, which must be on the same file
    system. The error of a full disk names `path`, which a write by itself does not.
    """
    temporary = (temporary_directory or path.parent) / f".{path.name}.{secrets.token_hex(4)}.tmp"
    try:
        with temporary.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in FULL:
            error.filename = os.fspath(path)
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the content of `path` by `data` in one step."""
    with atomic_file(path) as stream:
        stream.write(data)


def sync_tree(path: Path) -> None:
    """Force the files that others wrote below a directory, and the directories themselves, to the disk."""
    for entry in path.rglob("*"):
        _sync(entry, os.O_NOFOLLOW)
    sync_directory(path)


def sync_directory(path: Path) -> None:
    """Force the names in a directory to the disk: a rename is durable only after this."""
    _sync(path, os.O_DIRECTORY)


def _sync(path: Path, flag: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | flag)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def place(stored: Path, path: Path) -> None:
    """Put a finished file into another directory, without a copy where the file system has hard links."""
    try:
        os.link(stored, path)
    except OSError:
        shutil.copyfile(stored, path)
