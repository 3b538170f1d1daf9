"""Temporary directories that name the process which makes them, so that the next process removes those whose
maker is gone and leaves those in use.
"""

import contextlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

_OWNER = re.compile(r"([0-9A-Za-z.]*)-([1-9][0-9]*)-[0-9a-f]+")
STALE_S = 24 * 3600.0  # nobody wrote for a day to a directory of a process that cannot be looked up


def owned_name() -> str:
    """Return a new name `<host>-<pid>-<random>` for a temporary directory of this process."""
    return f"{_host()}-{os.getpid()}-{secrets.token_hex(6)}"


def is_running(name: str) -> bool | None:
    """Return whether the process that made a directory of that name runs; None where that cannot be known,
    because it ran on another host or the name is of another kind.
    """
    owner = _OWNER.match(name)
    if owner is None or owner[1] != _host():
        return None
    try:
        os.kill(int(owner[2]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it runs, under another user
        return True
    return True


def is_abandoned(path: Path, name: str) -> bool:
    """Return whether the process that made a directory under that name is gone, or cannot be looked up and
    has written nothing for a day.
    """
    running = is_running(name)
    return running is False or (running is None and _age_s(path) > STALE_S)


def set_aside(directory: Path) -> None:
    """Take a directory away by one rename, then delete it, so that nobody sees a part of it."""
    with neighbour(directory, "removing") as place:
        os.rename(directory, place / directory.name)


@contextlib.contextmanager
def neighbour(directory: Path, purpose: str, *, go_on: bool = False) -> Iterator[Path]:
    """Yield a new directory `.<name>.<owner>.<purpose>` on the file system of `directory`; it is removed at
    the end unless the block has renamed it. Those that killed processes left there are removed first, or with
    `go_on` one of them is yielded, with the plain files that are in it.
    """
    parent = directory.parent
    parent.mkdir(parents=True, exist_ok=True)
    temporary = parent / f".{directory.name}.{owned_name()}.{purpose}"
    if go_on:
        _take_over(parent, f".{directory.name}.", f".{purpose}", temporary)
    _remove_abandoned(parent, f".{directory.name}.", f".{purpose}")
    try:
        temporary.mkdir(exist_ok=go_on)
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _take_over(parent: Path, start: str, end: str, target: Path) -> None:
    """Rename an abandoned directory with such a name to `target`, where there is one without links."""
    for path in parent.iterdir():
        if not (path.name.startswith(start) and path.name.endswith(end)) or path.is_symlink():
            continue
        if not is_abandoned(path, path.name.removeprefix(start).removesuffix(end)):
            continue
        inside = list(path.rglob("*"))
        if not any(each.is_symlink() or not (each.is_dir() or each.is_file()) for each in inside):
            with contextlib.suppress(OSError):  # another process may take it first
                os.rename(path, target)
                return


def _remove_abandoned(parent: Path, start: str, end: str) -> None:
    """Remove abandoned directories with such a name. A symbolic link is left alone."""
    for path in list(parent.iterdir()):
        if not (path.name.startswith(start) and path.name.endswith(end)):
            continue
        if is_abandoned(path, path.name.removeprefix(start).removesuffix(end)):
            shutil.rmtree(path, ignore_errors=True)


def _age_s(path: Path) -> float:
    """Return the seconds since something in a directory was written; 0 where it changes just now."""
    try:
        newest = max(each.lstat().st_mtime for each in (path, *path.rglob("*")))
    except OSError:
        return 0.0
    return time.time() - newest


def _host() -> str:
    return re.sub(r"[^0-9A-Za-z.]", ".", socket.gethostname())
