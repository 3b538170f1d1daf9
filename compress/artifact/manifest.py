"""The manifest of an artifact (`compress.json`), and the check that the directory still matches it.

An artifact is a directory of files plus `compress.json`, written last. Its digest is the digest of the
manifest, which names every file and every tensor by digest: equal digest means equal artifact. Nothing in it
depends on the date, the host, the device or a version of this program.
"""

import hashlib
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from compress.artifact.header import BITS_OF_DTYPE, MAX_DIM, read_header
from compress.artifact.seal import check_seal
from compress.digest import canonical_json, digest_bytes, digest_file, num_hashers
from compress.errors import StorageError, UsageError
from compress.untrusted.fields import Fields
from compress.untrusted.files import open_plain, read_bytes
from compress.untrusted.parse import Malformed, parse_json
from compress.untrusted.text import one_line

MANIFEST_NAME = "compress.json"
LINKS_NAME = "artifacts"
"""The directory of a run that links the artifact of each stage."""
SCHEMA_VERSION = 1
MAX_MANIFEST_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 23
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_FACTS_BY_NAME = frozenset(
    {"mixed", "kv_cache", "draft", "pruning", "distillation", "recovery", "speculation"}
)


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
            value = parse_json(data)
        except Malformed as error:
            raise StorageError(
                f"{where} is damaged: not valid JSON ({error}); fetch or build the artifact again."
            ) from None
        if not isinstance(value, dict) or type(value.get("schema_version")) is not int:
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
        stated = Fields(value, where, StorageError)
        check_described(stated)
        manifest = cls(
            **{
                **value,
                "layers": tuple(stated.items("layers")),
                "tensors": tuple(_tensor_record(each, where) for each in stated.items("tensors")),
                "files": tuple(_file_record(each, where) for each in stated.items("files")),
            }
        )
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


def check_described(manifest: Fields) -> None:
    """Check by type what a manifest states of the model, how it was made and what was measured, as far as
    readers of any artifact index into it; `Arch.from_json` and `ModelScheme.from_json` check all of theirs.

    Raises:
        StorageError: a value has another type.
    """
    manifest.text("role")
    for name in ("arch", "scheme"):
        if manifest.has(name):
            manifest.mapping(name)
    layers = Fields(dict(enumerate(manifest.items("layers"))), f"layers of {manifest.where}", StorageError)
    for idx in layers:
        layer = layers.fields(idx)
        if layer.has("rope"):
            layer.fields("rope").text("kind")
            layer.fields("rope").number("theta", 0, 1e300)
    scheme = manifest.fields("scheme", default={})
    scheme.text("name", default="")
    scheme.mapping("head", default={})
    for item in scheme.items("exceptions") if "exceptions" in set(scheme) else ():
        exception = Fields(item, f"an exception in the scheme of {manifest.where}", StorageError)
        exception.texts("linears")
        exception.fields("scheme", default={"name": ""}).text("name")
    facts = manifest.fields("facts")
    for name in _FACTS_BY_NAME & set(facts):
        facts.mapping(name)
    facts.fields("kv_cache", default={}).text("format", default="")
    facts.fields("draft", default={}).text("kind", default="")
    facts.text("format", default="")
    facts.texts("warnings", default=())
    for gate in facts.items("gates", default=()):
        Fields(gate, f"a gate in the facts of {manifest.where}", StorageError)
    provenance = manifest.fields("provenance")
    for name in {"stage", "key"} & set(provenance):
        provenance.text(name)
    if "parents" in set(provenance):
        parents = provenance.fields("parents")
        for name in parents:
            parents.text(name)


def _tensor_record(value: Any, where: str) -> TensorRecord:
    record = _record(TensorRecord, value, f"a tensor record of {where}")
    shape = record.integers("shape", 0, MAX_DIM)
    if record.text("dtype") not in BITS_OF_DTYPE:
        raise record.wrong("dtype", record.text("dtype"), "a dtype of safetensors files")
    return TensorRecord(
        record.text("name"),
        record.text("dtype"),
        tuple(shape),
        record.text("file"),
        _digest(record),
    )


def _file_record(value: Any, where: str) -> FileRecord:
    record = _record(FileRecord, value, f"a file record of {where}")
    path = record.text("path")
    check_relative(path, where)
    return FileRecord(path, record.integer("size_bytes", 0, 1 << 60), _digest(record))


def _record(kind: type[FileRecord | TensorRecord], value: Any, where: str) -> Fields:
    """Return the fields of a record that has those of its kind and no other."""
    record = Fields(value, where, StorageError)
    if odd := sorted(set(record) ^ {each.name for each in fields(kind)}):
        raise StorageError(f"{where} has missing or unknown fields: {', '.join(odd)}.")
    return record


def _digest(record: Fields) -> str:
    digest = record.text("digest")
    if not _DIGEST.fullmatch(digest):
        raise record.wrong("digest", digest, "sha256: and 64 hexadecimal digits")
    return digest


def check_relative(path: str, where: str) -> None:
    """Refuse a file name that would leave the directory it is put into, or take the manifest's place.

    Raises:
        StorageError: for an absolute or empty path, a `..` part, a backslash, a character that cannot be
            printed, or `compress.json` itself.
    """
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in path or one_line(path) != path:
        raise StorageError(
            f"{where} names a file '{one_line(path)}' that is not a plain path inside the artifact; it is "
            f"refused as unsafe."
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
    with ThreadPoolExecutor(max_workers=num_hashers()) as pool:
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
        # A file's digest and its tensors' are computed side by side (hashlib releases the GIL): the largest
        # file, that of the embeddings, is what all others wait for.
        with open_plain(path, follow_links=False) as stream, ThreadPoolExecutor(max_workers=1) as other:
            if headers:
                prefix = stream.read(headers[0].begin)
                whole.update(prefix)
                size_bytes += len(prefix)
            for header in headers:
                part = hashlib.sha256()
                remaining = header.end - header.begin
                while remaining and (chunk := stream.read(min(_CHUNK_BYTES, remaining))):
                    hashed = other.submit(part.update, chunk)
                    whole.update(chunk)
                    hashed.result()
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


def note_on_run(path: Path) -> str:
    """Return a sentence that names the finished artifact in the directory of a run; empty for other paths."""
    finished = path / LINKS_NAME / "export"
    if not (finished / MANIFEST_NAME).is_file():
        return ""
    return f" {path} is the directory of a run, whose artifact is {finished}."


def open_artifact(path: Path) -> Artifact:
    """Open the artifact in a directory without reading its files.

    Raises:
        UsageError: there is no `compress.json`, or it is of a newer schema.
        StorageError: `compress.json` is damaged, or not the one that a workspace stored there.
    """
    manifest_path = path / MANIFEST_NAME
    try:
        data = read_bytes(manifest_path, max_bytes=MAX_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        if not path.exists():
            raise UsageError(f"{path} is not an artifact: it does not exist.") from error
        raise UsageError(
            f"{path} is not an artifact: it has no {MANIFEST_NAME}. An artifact is written by `compress "
            f"run` or `compress pull`.{note_on_run(path)}"
        ) from error
    except OSError as error:
        raise StorageError(f"{manifest_path} cannot be read: {error.strerror}.") from error
    artifact = Artifact(path, Manifest.from_bytes(data, where=str(manifest_path)))
    check_seal(path, artifact.digest)
    return artifact


def verify_artifact(artifact: Artifact, *, digest_of: Callable[[Path], str] = digest_file) -> None:
    """Compare every file with the manifest; `digest_of` returns the digest of a file, by default by reading
    all of it.

    Raises:
        StorageError: naming the first file that is missing, changed or not in the manifest.
    """
    stored = read_bytes(artifact.path / MANIFEST_NAME, max_bytes=MAX_MANIFEST_BYTES)
    if stored != artifact.manifest.to_bytes():
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
    with ThreadPoolExecutor(max_workers=num_hashers()) as pool:
        digests = pool.map(lambda name: digest_of(artifact.path / name), expected)
        for (name, record), digest in zip(expected.items(), digests, strict=True):
            if digest != record.digest:
                raise StorageError(
                    f"{artifact.path / name} has changed: its digest is {digest} and the manifest says "
                    f"{record.digest}; "
                    "fetch or build the artifact again."
                )
