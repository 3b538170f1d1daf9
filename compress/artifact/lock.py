"""Locks of files by `flock(2)`, held by many readers or by one owner. The kernel frees the lock of a process
that ended, however it ended.

A child process does not inherit a lock. On NFS the lock holds between hosts from version 4 on, or with a lock
daemon; a file system mounted with `nolock` or `local_lock=flock` excludes only processes of one host.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from compress.artifact.leftovers import is_abandoned, owned_name
from compress.errors import StorageError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def locked(path: Path, *, shared: bool = False, wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of a file while the block runs: with other readers where it is `shared`, else alone.

    While another process holds it, `wait` is called again and again; it sleeps, or raises to give up.

    Raises:
        BlockingIOError: another process holds it, and `wait` is None.
        StorageError: the file system has no locks.
        OSError: the file cannot be made.
    """
    descriptor = _opened(path, shared=shared, wait=wait)
    try:
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked_once(path: Path, *, wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a file alone while the block runs, and remove the file at the end, so that locks of
    many names leave nothing; errors are those of `locked`.
    """
    while True:
        descriptor = _opened(path, shared=False, wait=wait)
        if _is_same_file(descriptor, path):
            break
        os.close(descriptor)  # the holder before has removed it, and the next one locks a new file
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


@contextlib.contextmanager
def signed(directory: Path) -> Iterator[None]:
    """List this process in a directory while the block runs, for `holders`."""
    directory.mkdir(exist_ok=True)
    own = directory / owned_name()
    own.touch()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            own.unlink(missing_ok=True)


def holders(directory: Path) -> str:
    """Return the processes that a directory lists, such as `process 12 on host`, and remove those that ended
    from the list; `another process` where it lists none.
    """
    found = []
    for path in sorted(directory.glob("*")):
        if is_abandoned(path, path.name):
            path.unlink(missing_ok=True)
        else:
            host, _, rest = path.name.rpartition("-")[0].rpartition("-")
            found.append(f"process {rest} on {host}")
    return ", ".join(found) or "another process"


def _opened(path: Path, *, shared: bool, wait: Callable[[], None] | None) -> int:
    """Return the descriptor of a file whose lock it holds."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        while True:
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if wait is None:
                    raise
                wait()
    except OSError as error:
        os.close(descriptor)
        if error.errno in _NO_LOCKS:
            raise StorageError(
                f"{path} cannot be locked: {error.strerror}.",
                where=path,
                hint="Name a place on a file system with locks.",
            ) from error
        raise
    except BaseException:
        os.close(descriptor)
        raise


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
