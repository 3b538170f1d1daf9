"""The index of an OCI image layout (`index.json`): which manifests a registry has, their tags and their
subjects (https://github.com/opencontainers/image-spec, image-layout.md).

A tag is an entry whose annotation `org.opencontainers.image.ref.name` is `name:tag`. When a tag moves, the
manifest it left stays listed without a name: a way back. Entries that other programs wrote may have any
shape; they are kept as they are, and refused only where they are requested.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from compress.errors import StorageError, UsageError
from compress.registry.image import IMAGE_INDEX, REF_NAME, SUBJECT, Descriptor
from compress.registry.protocol import Tag
from compress.registry.ref import check_name, check_tag
from compress.untrusted.parse import Malformed


@dataclass(frozen=True)
class ImageIndex:
    """One index; `where` names its file in errors, and `rest` holds its fields other than `manifests`."""

    entries: tuple[Any, ...]
    rest: dict[str, Any]
    where: str

    @classmethod
    def empty(cls, where: str) -> "ImageIndex":
        """Return the index of a registry that holds nothing yet."""
        return cls((), {"schemaVersion": 2, "mediaType": IMAGE_INDEX}, where)

    @classmethod
    def from_json(cls, value: Any, where: str) -> "ImageIndex":
        """Return the index in a JSON value.

        Raises:
            Malformed: it is not an object with a list of manifests.
        """
        if not isinstance(value, dict):
            raise Malformed("it is not an object")
        if not isinstance(value.get("manifests"), list):
            raise Malformed("its manifests are no list")
        rest = {key: each for key, each in value.items() if key != "manifests"}
        return cls(tuple(value["manifests"]), rest, where)

    def to_bytes(self) -> bytes:
        """Return the file. A manifest without a name is listed once, and only while no other entry lists
        it.
        """
        listed = {_digest(entry) for entry in self.entries if _annotations(entry)}
        unique = []
        for entry in self.entries:
            if _annotations(entry) or not _digest(entry) or _digest(entry) not in listed:
                unique.append(entry)
                listed.add(_digest(entry))
        return (json.dumps({**self.rest, "manifests": unique}, indent=2) + "\n").encode()

    def find(self, digest: str) -> Descriptor | None:
        """Return the manifest of that digest, tagged or not."""
        return next((self._descriptor(entry) for entry in self.entries if _digest(entry) == digest), None)

    def read_tag(self, name: str, tag: str) -> Descriptor | None:
        """Return the manifest that `name:tag` points to."""
        wanted = f"{name}:{tag}"
        return next((self._descriptor(entry) for entry in self.entries if _ref_name(entry) == wanted), None)

    def tags(self) -> tuple[Tag, ...]:
        """Return every tag, sorted by name and tag; entries of other shapes are left out."""
        found = []
        for entry in self.entries:
            name, colon, tag = _ref_name(entry).rpartition(":")
            with contextlib.suppress(UsageError, StorageError):
                if colon:
                    found.append(Tag(check_name(name), check_tag(tag), self._descriptor(entry)))
        return tuple(sorted(found, key=lambda item: (item.name, item.tag)))

    def attached(self, subject: Descriptor) -> tuple[Descriptor, ...]:
        """Return the manifests that refer to the subject, oldest first."""
        return tuple(
            self._descriptor(entry)
            for entry in self.entries
            if _annotations(entry).get(SUBJECT) == subject.digest
        )

    def with_tags(self, name: str, tags: Sequence[str], manifest: Descriptor) -> "ImageIndex":
        """Return the index after all these tags have moved to a manifest."""
        names = [f"{name}:{tag}" for tag in tags]
        kept = [_without_name(entry) if _ref_name(entry) in names else entry for entry in self.entries]
        moved = [{**manifest.to_json(), "annotations": {REF_NAME: ref_name}} for ref_name in names]
        return replace(self, entries=(*kept, *moved))

    def with_tags_if(
        self, name: str, tags: Sequence[str], manifest: Descriptor, *, guard: str, expected: str | None
    ) -> "ImageIndex | None":
        """Return the same if `name:guard` points to the manifest of the digest `expected` (None: to nothing);
        else None.
        """
        held = self.read_tag(name, guard)
        same = (None if held is None else held.digest) == expected
        return self.with_tags(name, tags, manifest) if same else None

    def with_attached(self, manifest: Descriptor, subject: Descriptor) -> "ImageIndex":
        """Return the index with a manifest that refers to the subject, as the newest."""
        kept = [entry for entry in self.entries if _digest(entry) != manifest.digest]
        entry = {**manifest.to_json(), "annotations": {SUBJECT: subject.digest}}
        return replace(self, entries=(*kept, entry))

    def _descriptor(self, entry: Any) -> Descriptor:
        return Descriptor.from_json(entry, self.where)


def _annotations(entry: Any) -> dict[str, Any]:
    annotations = entry.get("annotations") if isinstance(entry, dict) else None
    return annotations if isinstance(annotations, dict) else {}


def _ref_name(entry: Any) -> str:
    name = _annotations(entry).get(REF_NAME)
    return name if isinstance(name, str) else ""


def _digest(entry: Any) -> str:
    digest = entry.get("digest") if isinstance(entry, dict) else None
    return digest if isinstance(digest, str) else ""


def _without_name(entry: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in _annotations(entry).items() if key != REF_NAME}
    bare = {key: value for key, value in entry.items() if key != "annotations"}
    return {**bare, "annotations": rest} if rest else bare
