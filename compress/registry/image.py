"""The JSON of OCI images 1.1: descriptors, and the manifests that an artifact and its evidence become.

An artifact is one image manifest: its config blob is `compress.json`, byte for byte (so the config digest is
the artifact digest), and each file is one layer with its path as title. Evidence is another manifest whose
`subject` is the first (https://github.com/opencontainers/image-spec, manifest.md).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from compress.artifact.manifest import FileRecord, check_relative
from compress.digest import canonical_json, digest_bytes
from compress.errors import StorageError
from compress.untrusted.fields import Fields
from compress.untrusted.parse import Malformed, parse_json

IMAGE_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
IMAGE_INDEX = "application/vnd.oci.image.index.v1+json"
EMPTY_CONFIG = "application/vnd.oci.empty.v1+json"
ARTIFACT = "application/vnd.compress.artifact.v1"
EVIDENCE = "application/vnd.compress.evidence.v1"
PROMOTION = "application/vnd.compress.promotion.v1"
STAGE_RESULT = "application/vnd.compress.stage.v1"
KEY_PARTS = "application/vnd.compress.key.v1+json"
SIGNATURE = "application/vnd.compress.signature.v1"
ARTIFACT_CONFIG = "application/vnd.compress.manifest.v1+json"
TENSOR_LAYER = "application/vnd.compress.tensors.v1+safetensors"
FILE_LAYER = "application/vnd.compress.file.v1"
TITLE = "org.opencontainers.image.title"
REF_NAME = "org.opencontainers.image.ref.name"
SUBJECT = "vnd.compress.subject"  # in index.json, so that referrers are found without opening every manifest
_MAX_BLOB_BYTES = 1 << 60
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Descriptor:
    """A blob: what it is, its digest and size, and the title of the file it holds, when it holds one."""

    media_type: str
    digest: str
    size_bytes: int
    title: str | None = None
    artifact_type: str | None = None

    def to_json(self, *, title_key: str = TITLE) -> dict[str, Any]:
        value: dict[str, Any] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size_bytes}
        if self.artifact_type is not None:
            value["artifactType"] = self.artifact_type
        if self.title is not None:
            value["annotations"] = {title_key: self.title}
        return value

    @classmethod
    def from_json(cls, value: Any, where: str) -> "Descriptor":
        """Return the descriptor in a JSON value; raise StorageError when it is none with a SHA-256 digest."""
        fields = value if isinstance(value, dict) else {}
        annotations = fields.get("annotations") or {}
        media_type = fields.get("mediaType")
        digest = fields.get("digest")
        size_bytes = fields.get("size")
        artifact_type = fields.get("artifactType")
        title = annotations.get(TITLE) if isinstance(annotations, dict) else annotations
        if not (
            isinstance(media_type, str)
            and isinstance(digest, str)
            and _DIGEST.fullmatch(digest)
            and isinstance(title, str | None)
            and isinstance(artifact_type, str | None)
        ):
            raise StorageError(f"{where} has a malformed descriptor {value!r:.200}; push the artifact again.")
        if type(size_bytes) is not int or not 0 <= size_bytes <= _MAX_BLOB_BYTES:
            raise StorageError(f"{where} gives no valid size for the blob {digest}; push the artifact again.")
        return cls(media_type, digest, size_bytes, title, artifact_type)

    def __str__(self) -> str:
        return f"blob {self.digest}" + (f" ({self.title})" if self.title else "")


@dataclass(frozen=True)
class ImageManifest:
    """One OCI image manifest; the bytes depend on nothing but its fields."""

    artifact_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]
    subject: Descriptor | None = None
    title_key: str = TITLE
    """The annotation that has the path of a layer's file."""

    def to_bytes(self) -> bytes:
        value: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": IMAGE_MANIFEST,
            "artifactType": self.artifact_type,
            "config": self.config.to_json(),
            "layers": [layer.to_json(title_key=self.title_key) for layer in self.layers],
        }
        if self.subject is not None:
            value["subject"] = self.subject.to_json()
        return canonical_json(value)

    @property
    def descriptor(self) -> Descriptor:
        data = self.to_bytes()
        return Descriptor(IMAGE_MANIFEST, digest_bytes(data), len(data), artifact_type=self.artifact_type)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> "ImageManifest":
        """Parse a manifest and check that its layers are files that may be written below one directory.

        Raises:
            StorageError: it is malformed, or a title is missing, repeated or unsafe.
        """
        try:
            value = Fields(parse_json(data), where, StorageError)
        except Malformed as error:
            raise StorageError(f"{where} is not an image manifest written by compress ({error}).") from None
        artifact_type = value.text("artifactType")
        layers = [Descriptor.from_json(layer, where) for layer in value.items("layers")]
        config = Descriptor.from_json(value.mapping("config"), where)
        subject = Descriptor.from_json(value.mapping("subject"), where) if value.has("subject") else None
        titles = [layer.title for layer in layers]
        for title in titles:
            if not isinstance(title, str):
                raise StorageError(
                    f"{where} has a layer without a file title; it was not pushed by compress."
                )
            check_relative(title, where)
        if len(set(titles)) < len(titles):
            raise StorageError(f"{where} has two layers of one title; push the artifact again.")
        return cls(artifact_type, config, tuple(layers), subject)


def file_layers(files: Iterable[FileRecord]) -> tuple[Descriptor, ...]:
    """Return one layer for each file."""
    return tuple(
        Descriptor(
            TENSOR_LAYER if record.path.endswith(".safetensors") else FILE_LAYER,
            record.digest,
            record.size_bytes,
            record.path,
        )
        for record in files
    )
