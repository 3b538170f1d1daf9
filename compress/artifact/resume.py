"""Resume points: what a stage has finished so far, in files of its scratch directory, for a run that is
started again.

Each file carries a digest of what it holds. A damaged one counts as not there: that work is done again.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.artifact.atomic import write_atomic
from compress.artifact.tensors import load_tensors, raw_bytes, save_tensors
from compress.digest import canonical_json, digest_file, digest_files, digest_json
from compress.errors import CompressError, StorageError
from compress.untrusted.parse import Malformed, read_json

_DIGEST = "digest"
_HASHED_AT_ONCE = 8
"""Tensors, each of which may be a copy from a GPU."""


class ResumePoint:
    """One file with a JSON value or with tensors. It is whole or it does not exist; damage is reported to
    `log`."""

    def __init__(self, path: Path, log: Callable[[str], None]) -> None:
        self._path = path
        self._log = log

    def save(self, value: Any) -> None:
        """Write a JSON value, with texts as keys, in place of an earlier one."""
        write_atomic(self._path, canonical_json({_DIGEST: digest_json(value), "value": value}))

    def load(self) -> Any:
        """Return the JSON value; None where there is none, or a damaged one."""
        if not self._path.exists():
            return None
        try:
            match read_json(self._path):
                case {"digest": digest, "value": value} if digest == digest_json(value):
                    return value
        except (Malformed, CompressError, OSError):
            pass
        self._tell_damage()
        return None

    def saved(self) -> Any:
        """Return a JSON value that this run wrote, or found whole when it began.

        Raises:
            StorageError: it is gone, or damaged since.
        """
        value = self.load()
        if value is None:
            raise self._changed()
        return value

    def save_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors in place of earlier ones; none of them may have the name of their digest."""
        if _DIGEST in tensors:
            raise ValueError(f"a tensor is named '{_DIGEST}'")
        save_tensors(self._path, {**tensors, _DIGEST: _digest(tensors)})

    def load_tensors(self) -> dict[str, Tensor] | None:
        """Return the tensors; None where there are none, or damaged ones."""
        if not self._path.exists():
            return None
        try:
            tensors = load_tensors(self._path)
            digest = tensors.pop(_DIGEST, None)
            if digest is not None and digest.equal(_digest(tensors)):
                return tensors
        except (CompressError, OSError):
            pass
        self._tell_damage()
        return None

    def saved_tensors(self) -> dict[str, Tensor]:
        """Return tensors that this run wrote, or found whole when it began.

        Raises:
            StorageError: they are gone, or damaged since.
        """
        tensors = self.load_tensors()
        if tensors is None:
            raise self._changed()
        return tensors

    def _changed(self) -> StorageError:
        return StorageError(f"{self._path} was changed while a run used it; run the same command again.")

    def _tell_damage(self) -> None:
        self._log(_damage(self._path))


def digests(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the digest of each of some files, for a resume point that vouches for them."""
    listed = list(names)
    return dict(zip(listed, digest_files(directory / name for name in listed), strict=True))


def are_whole(directory: Path, stated: Mapping[str, str], log: Callable[[str], None]) -> bool:
    """Return whether the files that a resume point vouches for are there, as they were."""
    for name, digest in stated.items():
        path = directory / name
        if not path.exists():
            return False
        try:
            whole = digest_file(path) == digest
        except (StorageError, OSError):
            whole = False
        if not whole:
            log(_damage(path))
            return False
    return True


def _damage(path: Path) -> str:
    return f"{path} is damaged; this part of the stage is computed again"


def _digest(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a digest of names, dtypes, shapes and elements, as bytes."""

    def described(name: str) -> list[Any]:
        tensor = tensors[name]
        elements = hashlib.sha256(raw_bytes(tensor)).hexdigest()
        return [name, str(tensor.dtype), list(tensor.shape), elements]

    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
        digest = digest_json(list(pool.map(described, sorted(tensors))))
    return torch.frombuffer(bytearray(digest.encode()), dtype=torch.uint8)
