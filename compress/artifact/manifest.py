"""The manifest of an artifact (`compress.json`), and the check that the directory still matches it.

An artifact is a directory of files plus `compress.json`, written last. Its digest is the digest of the
manifest, which names every file and every tensor by digest: equal digest means equal artifact. Nothing in it
depends on the date, the host, the device or a version of this program.
"""

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from compress.artifact.header import read_header
from compress.digest import canonical_json, digest_bytes, digest_file
from compress.errors import StorageError, UsageError

MANIFEST_NAME = "compress.json"
SCHEMA_VERSION = 1
_CHUNK_BYTES = 1 << 20
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NUM_HASHERS = 4
"""SHA-256 runs near 1.5 GB/s on one core, below one NVMe disk; hashlib releases the GIL."""


@dataclass(frozen=True)
class FileRecord:
    """One file; `path` is relative to the artifact, with forward slashes."""

    path: str
    size_bytes: int
    digest: str


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of a safetensors file; `digest` covers its raw bytes, so it survives re-sharding."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    digest: str


@dataclass(frozen=True)
class Manifest:
    """The content of `compress.json`. `arch`, `layers`, `scheme` and `facts` are JSON values of the stage
    that wrote the artifact.

    `provenance` is `{"stage": str, "key": str, "parents": {name: artifact digest}}`.
    """

    role: str
    arch: dict[str, Any] | None = None
    layers: tuple[dict[str, Any], ...] = ()
    scheme: dict[str, Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[TensorRecord, ...] = ()
    files: tuple[FileRecord, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def to_bytes(self) -> bytes:
        """Return the one byte form: sorted keys, one space of indent so that two manifests can be compared
        line by line.
        """
        canonical = json.loads(canonical_json(asdict(self)))
        return (
            json.dumps(canonical, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        ).encode()

    @property
    def digest(self) -> str:
        return digest_bytes(self.to_bytes())

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = MANIFEST_NAME) -> "Manifest":
        """Parse a manifest; `where` names its origin in errors.

        Raises:
            StorageError: the bytes are not a manifest (damaged or edited).
            UsageError: the manifest was written in a newer schema.
        """
        try:
            value = json.loads(data)
        except ValueError as error:
            raise StorageError(
                f"{where} is damaged: not valid JSON ({error}); fetch or build the artifact again."
            ) from error
        if not isinstance(value, dict) or not isinstance(value.get("schema_version"), int):
            raise StorageError(f"{where} is not an artifact manifest: it has no schema_version.")
        if value["schema_version"] > SCHEMA_VERSION:
            raise UsageError(
                f"{where} has schema version {value['schema_version']}; this program reads up to "
                f"{SCHEMA_VERSION}: upgrade it."
            )
        if odd := sorted(value.keys() ^ {item.name for item in fields(cls)}):
            raise StorageError(
                f"{where} is not an artifact manifest: missing or unknown fields {', '.join(odd)}."
            )
        try:
            tensors = tuple(
                TensorRecord(**{**record, "shape": tuple(record["shape"])}) for record in value["tensors"]
            )
            files = tuple(FileRecord(**record) for record in value["files"])
            manifest = cls(**{**value, "layers": tuple(value["layers"]), "tensors": tensors, "files": files})
        except (KeyError, TypeError) as error:
            raise StorageError(f"{where} is not an artifact manifest: {error}.") from error
        for record in files:
            if not (
                isinstance(record.path, str)
                and isinstance(record.size_bytes, int)
                and _DIGEST.fullmatch(str(record.digest))
            ):
                raise StorageError(
                    f"{where} is not an artifact manifest: the file record {record} is malformed."
                )
            check_relative(record.path, where)
        if manifest.to_bytes() != data:  # so the digest of the file is the digest of the manifest
            raise StorageError(
                f"{where} was edited: it is not byte for byte what this program writes; fetch or build the "
                f"artifact again."
            )
        return manifest


@dataclass(frozen=True)
class Artifact:
    """A directory and its manifest. Opening one reads only `compress.json`; `verify_artifact` reads
    everything.
    """

    path: Path
    manifest: Manifest

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def size_bytes(self) -> int:
        """The sum over the files, without the manifest itself."""
        return sum(record.size_bytes for record in self.manifest.files)

    def file(self, name: str) -> Path:
        """Return the path of a file; asking for a name that the manifest lacks is a programmer's error."""
        if all(record.path != name for record in self.manifest.files):
            raise UsageError(f"the {self.manifest.role} artifact at {self.path} has no file '{name}'.")
        return self.path / name


def check_relative(path: str, where: str) -> None:
    """Refuse a file name that would leave the directory it is put into, or take the manifest's place.

    Raises:
        StorageError: for an absolute or empty path, a `..` part, a backslash or control character, or
            `compress.json` itself.
    """
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or any(char < " " or char in "\\\x7f" for char in path):
        raise StorageError(
            f"{where} names a file '{path}' that is not a plain path inside the artifact; it is refused as "
            f"unsafe."
        )
    if path == MANIFEST_NAME:
        raise StorageError(
            f"{where} lists {MANIFEST_NAME} as a content file; a manifest cannot contain itself."
        )


def describe_files(path: Path) -> tuple[tuple[FileRecord, ...], tuple[TensorRecord, ...]]:
    """Digest every file of a directory but its manifest, and every tensor of its safetensors files, reading
    each byte once.

    Raises:
        StorageError: a file is unreadable, a link or not a plain file.
        UnsupportedFormat: a `*.safetensors` file is malformed.
    """
    with ThreadPoolExecutor(max_workers=_NUM_HASHERS) as pool:
        described = list(pool.map(lambda name: _describe(path, name), file_names(path)))
    tensors = [record for _, records in described for record in records]
    return tuple(record for record, _ in described), tuple(
        sorted(tensors, key=lambda record: (record.file, record.name))
    )


def file_names(path: Path) -> list[str]:
    """Return the content files of a directory, sorted, relative, with forward slashes. Links are refused:
    their target is not under our digest.
    """
    names = []
    for entry in sorted(path.rglob("*")):
        name = entry.relative_to(path).as_posix()
        if entry.is_symlink() or not (entry.is_dir() or entry.is_file()):
            raise StorageError(
                f"{entry} is a link or a special file; an artifact holds plain files only, so copy its "
                f"target in its place."
            )
        if entry.is_file() and name != MANIFEST_NAME:
            check_relative(name, str(path))
            names.append(name)
    return sorted(names)


def _describe(root: Path, name: str) -> tuple[FileRecord, list[TensorRecord]]:
    path = root / name
    headers = read_header(path) if name.endswith(".safetensors") else ()
    whole = hashlib.sha256()
    tensors = []
    size_bytes = 0
    try:
        with path.open("rb") as stream:
            if headers:
                prefix = stream.read(headers[0].begin)
                whole.update(prefix)
                size_bytes += len(prefix)
            for header in headers:
                part = hashlib.sha256()
                remaining = header.end - header.begin
                while remaining and (chunk := stream.read(min(_CHUNK_BYTES, remaining))):
                    whole.update(chunk)
                    part.update(chunk)
                    remaining -= len(chunk)
                if remaining:
                    raise StorageError(
                        f"{path} became shorter while it was read; nothing may write to an artifact that is "
                        f"being described."
                    )
                size_bytes += header.end - header.begin
                tensors.append(
                    TensorRecord(header.name, header.dtype, header.shape, name, "sha256:" + part.hexdigest())
                )
            while chunk := stream.read(_CHUNK_BYTES):
                whole.update(chunk)
                size_bytes += len(chunk)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}.") from error
    return FileRecord(name, size_bytes, "sha256:" + whole.hexdigest()), tensors


def open_artifact(path: Path) -> Artifact:
    """Open the artifact in a directory without reading its files.

    Raises:
        UsageError: there is no `compress.json`, or it is of a newer schema.
        StorageError: `compress.json` is damaged.
    """
    manifest_path = path / MANIFEST_NAME
    try:
        data = manifest_path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(
            f"{path} is not an artifact: it has no {MANIFEST_NAME}. An artifact is written by `compress "
            f"run` or `compress pull`."
        ) from error
    except OSError as error:
        raise StorageError(f"{manifest_path} cannot be read: {error.strerror}.") from error
    return Artifact(path, Manifest.from_bytes(data, where=str(manifest_path)))


def verify_artifact(artifact: Artifact) -> None:
    """Read every file again and compare it with the manifest.

    Raises:
        StorageError: naming the first file that is missing, changed or not in the manifest.
    """
    if (artifact.path / MANIFEST_NAME).read_bytes() != artifact.manifest.to_bytes():
        raise StorageError(
            f"{artifact.path / MANIFEST_NAME} is not byte for byte what this program wrote; fetch or build "
            f"the artifact again."
        )
    expected = {record.path: record for record in artifact.manifest.files}
    present = set(file_names(artifact.path))
    if missing := sorted(expected.keys() - present):
        raise StorageError(
            f"{artifact.path} lacks the file '{missing[0]}' that its manifest names; fetch or build the "
            f"artifact again."
        )
    if extra := sorted(present - expected.keys()):
        raise StorageError(
            f"{artifact.path} holds the file '{extra[0]}' that its manifest does not name; remove it or "
            f"build the artifact again."
        )
    with ThreadPoolExecutor(max_workers=_NUM_HASHERS) as pool:
        digests = pool.map(lambda name: digest_file(artifact.path / name), expected)
        for (name, record), digest in zip(expected.items(), digests, strict=True):
            if digest != record.digest:
                raise StorageError(
                    f"{artifact.path / name} has changed: its digest is {digest} and the manifest says "
                    f"{record.digest}; "
                    "fetch or build the artifact again."
                )
