"""Results of stages in a registry, by key, so that one machine finds what another one built.

A cache is a name in a registry; each entry is one image manifest under the tag `<key>`:

    config   the parts of the key, whose digest is the key (artifact/key_parts.py)
    layers   one for each file of the result, as a pushed artifact has them, and its `compress.json`

An entry is compared with its key: the parts must have the digest that the tag names, the result must state
the same stage, inputs and key, and every file must have the digest in the result's manifest. That a result is
what its stage computes is not checked, as that means computing it: a cache is trusted like its writers.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from compress.artifact.key_parts import MAX_PARTS_BYTES, KeyParts
from compress.artifact.manifest import MANIFEST_NAME, Artifact, Manifest
from compress.context import Progress
from compress.digest import digest_bytes
from compress.errors import StorageError, UsageError
from compress.registry.blobs import fetch_files, read_blob, store_image
from compress.registry.image import (
    ARTIFACT_CONFIG,
    KEY_PARTS,
    STAGE_RESULT,
    Descriptor,
    ImageManifest,
    file_layers,
)
from compress.registry.protocol import ModelHub, Registry, open_registry
from compress.registry.ref import Ref, compose_ref

_KEY = re.compile(r"[0-9a-f]{64}(\.[0-9A-Za-z_-]+)?")
_MANIFEST_TITLE = f"manifest/{MANIFEST_NAME}"
"""Title of the layer with the result's manifest, which as a file of the result would be refused."""


@dataclass(frozen=True)
class CachedStage:
    """An entry of a cache as its manifests describe it; its files have not been read yet."""

    parts: KeyParts
    image: ImageManifest
    manifest: Manifest

    @property
    def digest(self) -> str:
        """The digest of the artifact."""
        return self.manifest.digest

    @property
    def size_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(record.size_bytes for record in self.manifest.files)


def parse_cache_ref(text: str) -> Ref:
    """Return the registry and name of a cache, as `oci://host/path/name`.

    Raises:
        UsageError: the text has another shape.
    """
    registry, _, name = text.rpartition("/")
    if not registry.partition("://")[2]:
        raise UsageError(
            f"'{text}' is not a cache of stage results; write scheme://registry/name, for example "
            "oci://host/path/stages or layout://cache/stages."
        )
    return compose_ref(registry, name)


class StageCache:
    """One cache; nothing is read or written before a method asks for it.

    Raises:
        UsageError: the reference is malformed, nothing serves its scheme, or the registry is no place for it.
        EnvironmentUnfit: the registry needs a package that is missing.
    """

    def __init__(self, text: str) -> None:
        ref = parse_cache_ref(text)
        self.url = f"{ref.registry}/{ref.name}"
        self._name = ref.name
        whole = open_registry(ref.registry)
        if isinstance(whole, ModelHub):
            raise UsageError(
                f"{text} cannot be a cache: each entry would be {whole.push_makes}. Name an oci://, s3:// or "
                "layout:// registry."
            )
        self._whole = whole

    def __str__(self) -> str:
        return self.url

    @property
    def _registry(self) -> Registry:
        return self._whole.repository(self._name)

    def look_up(self, key: str) -> Descriptor | None:
        """Return the manifest under a key, None where there is none: one request.

        Raises:
            UsageError: there is no registry yet.
            StorageError: the registry cannot be read.
        """
        return self._registry.read_tag(self._name, key)

    def entry(self, parts: KeyParts, found: Descriptor) -> CachedStage:
        """Return the entry that was looked up, after comparing its manifests with the parts of the key.

        Raises:
            StorageError: it is not of that key, or cannot be read.
        """
        image = self._image(parts.key, found)
        if image.config.digest != parts.digest:
            raise self._wrong(parts.key, "its parts have another digest than the key")
        return self._opened(parts, image)

    def entry_of_key(self, key: str, found: Descriptor) -> CachedStage:
        """Return the entry of a key whose parts only the cache has; errors are those of `entry`."""
        image = self._image(key, found)
        if image.config.size_bytes > MAX_PARTS_BYTES:
            raise self._wrong(key, "its parts are larger than parts can be")
        parts = KeyParts.from_bytes(read_blob(self._registry, image.config), key)
        return self._opened(parts, image)

    def entry_keys(self) -> tuple[str, ...]:
        """Return the keys of all entries, sorted; tags of another shape are left out."""
        named = (each.tag for each in self._registry.tags() if each.name == self._name)
        return tuple(tag for tag in named if _KEY.fullmatch(tag))

    def fetch(self, found: CachedStage, directory: Path, *, progress: Progress) -> Manifest:
        """Copy the files of an entry into an empty directory, each compared with its digest, and return their
        manifest, which is not written.

        Raises:
            StorageError: a blob is missing or differs from its digest.
        """
        files = ImageManifest(STAGE_RESULT, found.image.config, file_layers(found.manifest.files))
        fetch_files(self._registry, files, directory, progress=progress)
        return found.manifest

    def store(self, parts: KeyParts, artifact: Artifact, *, progress: Progress) -> int:
        """Put an entry, its tag last, and return the number of new blobs.

        Raises:
            StorageError: a file has changed since it was described, or the registry cannot be written.
        """
        _check_of_key(parts, artifact.manifest, f"the artifact at {artifact.path}")
        manifest = artifact.manifest.to_bytes()
        data = parts.to_bytes()
        described = Descriptor(ARTIFACT_CONFIG, digest_bytes(manifest), len(manifest), _MANIFEST_TITLE)
        image = ImageManifest(
            STAGE_RESULT,
            Descriptor(KEY_PARTS, digest_bytes(data), len(data)),
            (*file_layers(artifact.manifest.files), described),
        )
        registry = self._registry
        held = {_MANIFEST_TITLE: manifest}
        num_new = store_image(registry, image, data, artifact.path, progress=progress, held=held)
        registry.write_tag(self._name, (parts.key,), image.descriptor)
        return num_new

    def _image(self, key: str, found: Descriptor) -> ImageManifest:
        image = ImageManifest.from_bytes(read_blob(self._registry, found), f"the entry {key} of {self}")
        if image.artifact_type != STAGE_RESULT:
            raise self._wrong(key, "it is no result of a stage")
        return image

    def _opened(self, parts: KeyParts, image: ImageManifest) -> CachedStage:
        """Return an entry after comparing its manifest with the parts of its key and with its layers."""
        where = f"the entry {parts.key} of {self}"
        described = [layer for layer in image.layers if layer.title == _MANIFEST_TITLE]
        if len(described) != 1:
            raise self._wrong(parts.key, "it has no manifest")
        manifest = Manifest.from_bytes(read_blob(self._registry, described[0]), where=where)
        _check_of_key(parts, manifest, where)
        stated = {(each.title, each.digest, each.size_bytes) for each in file_layers(manifest.files)}
        there = {(each.title, each.digest, each.size_bytes) for each in image.layers if each not in described}
        if stated != there:
            raise self._wrong(parts.key, "its files are not those of its manifest")
        return CachedStage(parts, image, manifest)

    def _wrong(self, key: str, reason: str) -> StorageError:
        return StorageError(f"the entry {key} of {self} is not used: {reason}.")


def _check_of_key(parts: KeyParts, manifest: Manifest, where: str) -> None:
    """Compare what a manifest states of its making with the parts of a key.

    Raises:
        StorageError: it is the result of another key, stage or input.
    """
    made = manifest.provenance
    key = parts.digest.removeprefix("sha256:")
    if made.get("key") != key or made.get("stage") != parts.stage:
        raise StorageError(f"{where} is not used: it is the result of another key.")
    parents = made.get("parents")
    source = {name: digest for name, digest in parts.inputs.items() if name == "source"}
    if not isinstance(parents, dict) or {**source, **parents} != dict(parts.inputs):
        raise StorageError(f"{where} is not used: it was built from other inputs than its key names.")
