"""Files that somebody else made: opened only where they are plain files, so that a FIFO or a device in the
place of one neither hangs nor answers.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from compress.errors import StorageError

_LFS_FIRST = b"version https://git-lfs.github.com/spec/"


def open_plain(path: Path, *, follow_links: bool = True) -> BinaryIO:
    """Return a buffered stream of a plain file. A FIFO is refused at once, instead of waiting for its writer.

    Raises:
        StorageError: it is a directory, a FIFO, a socket or a device.
        OSError: it cannot be opened; with `follow_links=False` also where it is a symbolic link (ELOOP).
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        kind = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(kind):
            raise StorageError(
                f"{path} is a {_kind_name(kind)} where a plain file belongs; put the file itself there."
            )
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def append_text(path: Path, text: str) -> None:
    """Append UTF-8 text to a plain file, made where there is none.

    Raises:
        StorageError: it is a link, a directory, a FIFO, a socket or a device.
        OSError: it cannot be written.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise StorageError(f"{path} is no plain file; remove it, so that one can be made.") from None
        raise
    with os.fdopen(descriptor, "ab") as stream:
        kind = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(kind):
            raise StorageError(f"{path} is a {_kind_name(kind)} where a plain file belongs; remove it.")
        stream.write(text.encode("utf-8", "backslashreplace"))


def read_bytes(path: Path, *, max_bytes: int, follow_links: bool = True) -> bytes:
    """Return the content of a plain file of at most `max_bytes`.

    Raises:
        StorageError: it is no plain file, or longer.
        OSError: it cannot be read.
    """
    with open_plain(path, follow_links=follow_links) as stream:
        size = os.fstat(stream.fileno()).st_size
        data = stream.read(size + 1) if size <= max_bytes else b""
        if len(data) > size:  # it grew, or is one of those that state no size
            data += stream.read(max_bytes + 1 - len(data))
    if size > max_bytes or len(data) > max_bytes:
        raise StorageError(
            f"{path} has {max(size, len(data)):,} bytes, and a file of this kind has at most "
            f"{max_bytes:,}; it is not what its name says."
        )
    return data


def read_text(path: Path, *, max_bytes: int) -> str:
    """Return a plain UTF-8 file, without its byte order mark if it has one.

    Raises:
        StorageError: it is no plain file, longer, or not UTF-8.
        OSError: it cannot be read.
    """
    try:
        return read_bytes(path, max_bytes=max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise StorageError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8.") from None


def is_lfs_pointer(data: bytes) -> bool:
    """Return whether a file that begins with `data`, of at least 8 bytes, is a Git LFS pointer: the few lines
    of text that `git clone` leaves where the content was not fetched.

    Source: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md.
    """
    return _LFS_FIRST.startswith(data[: len(_LFS_FIRST)]) and len(data) >= 8


def lfs_pointer_error(path: Path) -> StorageError:
    """Return the error of a file whose content Git LFS did not fetch."""
    return StorageError(
        f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in the clone, or download the "
        f"file."
    )


def check_within(root: Path, path: Path) -> None:
    """Check that a file of a directory does not lead out of it by a symbolic link. The blobs of a Hugging
    Face cache, to which the files of its snapshots link, count as inside.

    Raises:
        StorageError: it leads elsewhere.
    """
    home = root.resolve()
    inside = [home]
    if home.parent.name == "snapshots":  # models--org--name/snapshots/<commit>/file -> ../../blobs/<digest>
        inside.append(home.parent.parent / "blobs")
    target = path.resolve()
    if not any(target.is_relative_to(each) for each in inside):
        raise StorageError(
            f"{path} is a link that leads out of {root}, to {target}; copy the file to where the link is."
        )


def _kind_name(mode: int) -> str:
    names = {
        stat.S_IFDIR: "directory",
        stat.S_IFIFO: "FIFO",
        stat.S_IFSOCK: "socket",
        stat.S_IFCHR: "device",
        stat.S_IFBLK: "device",
    }
    return names.get(stat.S_IFMT(mode), "special file")
