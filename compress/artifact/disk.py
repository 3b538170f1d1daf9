"""Errors of disks that a user can mend: full, over a quota, read-only, not permitted, or with a file in the
place of a directory.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from compress.errors import StorageError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)
_IN_THE_WAY = (errno.EEXIST, errno.ENOTDIR)


@contextlib.contextmanager
def explained(path: Path, *, hint: str) -> Iterator[None]:
    """Turn an error of that kind in the block into a StorageError that names its file, or `path` where the
    error names none, and what to do about it.
    """
    try:
        yield
    except OSError as error:
        told = write_error(error, path=path, hint=hint)
        if told is None:
            raise
        raise told from error


def write_error(error: OSError, *, path: Path | None = None, hint: str | None = None) -> StorageError | None:
    """Return the error with the file and what to do about it, or None where it is of another kind.

    `path` is used where the error itself names no file; `hint` replaces the general advice.
    """
    named = error.filename2 or error.filename  # a copy and a rename name their target second
    where = path if not isinstance(named, str | bytes | os.PathLike) else Path(os.fsdecode(named))
    subject = "a file" if where is None else where
    if error.errno in _IN_THE_WAY:
        file = None if where is None else file_in_the_way(where)
        if file is None:
            return None
        message = f"{subject} cannot be a directory: {file} is a file."
        return StorageError(message, where=where, hint="Name another place, or move the file away.")
    if error.errno in FULL:
        space = "" if where is None else _free_text(where)
        reason = f"{os.strerror(error.errno)}{space}"
        advice = hint or "Free space there, or name a place on another file system."
    elif error.errno in REFUSED:
        reason = os.strerror(error.errno)
        advice = hint or "Give this user access to it, or name another place."
    else:
        return None
    verb = "cannot be written" if error.errno not in (errno.EACCES, errno.EPERM) else "cannot be used"
    return StorageError(f"{subject} {verb}: {reason}.", where=where, hint=advice)


def file_in_the_way(directory: Path) -> Path | None:
    """Return the file that is in the place of a directory or of a folder above it; None without one."""
    return next(
        (each for each in (directory, *directory.parents) if os.path.lexists(each) and not each.is_dir()),
        None,
    )


def _free_text(path: Path) -> str:
    """Return ` (1,024 bytes free on its file system)`, or nothing where that cannot be found out."""
    for place in (path, *path.absolute().parents):
        try:
            return f" ({shutil.disk_usage(place).free:,} bytes free on its file system)"
        except FileNotFoundError:
            continue
        except OSError:
            break
    return ""
