"""The interface of a registry. A module of this package registers a factory under the scheme of its URLs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

from compress.plugins import PluginSet
from compress.registry.image import Descriptor
from compress.registry.ref import parse_registry


@dataclass(frozen=True)
class Tag:
    """`name:tag` and the manifest it points to now."""

    name: str
    tag: str
    manifest: Descriptor


class Registry(Protocol):
    """Blobs by digest, and names that point to manifests among them. A blob never changes; only `write_tag`
    makes anything visible.

    `num_transfers` is the number of blobs that may be stored or read at once, from as many threads.
    """

    num_transfers: int

    def repository(self, name: str) -> "Registry":
        """Return the registry as pushes and pulls of one name use it. Where blobs are stored for each name
        (OCI), the methods of blobs and manifests work on what this returns; other registries return
        themselves.

        Raises:
            UsageError: the registry cannot have that name.
        """
        ...

    def has(self, blob: Descriptor) -> bool:
        """Return whether the blob is there and whole, so that it need not be put."""
        ...

    def put(self, blob: Descriptor, source: Path | bytes) -> None:
        """Store a blob; StorageError, and nothing stored, when the source does not match the descriptor."""
        ...

    def get(self, blob: Descriptor) -> AbstractContextManager[BinaryIO]:
        """Open the bytes of a blob, unverified: the reader checks them. StorageError when it is not there."""
        ...

    def check_place(self) -> None:
        """Check, without making anything, that something can be pushed there.

        Raises:
            UsageError: the place holds other things.
            StorageError: nobody answers there.
        """
        ...

    def find(self, digest: str) -> Descriptor | None:
        """Return the manifest of that digest, tagged or not."""
        ...

    def read_tag(self, name: str, tag: str) -> Descriptor | None:
        """Return the manifest that `name:tag` points to."""
        ...

    def write_tag(self, name: str, tags: Sequence[str], manifest: Descriptor) -> None:
        """Point all these tags to a manifest whose blobs are stored; what they pointed to stays reachable by
        digest. Each tag moves in one step, and all of them in the same one where the store can do that.
        """
        ...

    def tags(self) -> tuple[Tag, ...]:
        """Return every tag, sorted by name and tag; of a repository those of its name, where the store
        holds each name apart.
        """
        ...

    def attach(self, manifest: Descriptor, subject: Descriptor) -> None:
        """List a stored manifest as one that refers to the subject, as the newest."""
        ...

    def attached(self, subject: Descriptor) -> tuple[Descriptor, ...]:
        """Return the manifests that refer to the subject, oldest first."""
        ...


@runtime_checkable
class GuardedRegistry(Protocol):
    """A registry in which an alias may be promoted: its tags can move on the condition that one of them still
    points where it did. Any other registry can be pushed to, and is no place for champions.
    """

    def write_tag_if(
        self, name: str, tags: Sequence[str], manifest: Descriptor, *, guard: str, expected: str | None
    ) -> bool:
        """Do what `write_tag` does if `name:guard` points to the manifest of the digest `expected` (None: to
        nothing), and return True; else move nothing and return False.

        Looking and moving are one step for every writer, also on other machines: by a lock, a conditional
        write (`If-Match` of an object store), or a commit on a stated parent.
        """
        ...


@runtime_checkable
class Committing(Protocol):
    """A registry that stores an artifact by a commit."""

    @property
    def revision(self) -> str | None:
        """The commit that has the files of the newest push."""
        ...


@runtime_checkable
class ModelHub(Protocol):
    """A registry for people who look for models: each push of a name is listed there for good, so it is no
    place for a cache of stage results.
    """

    push_makes: str
    """The noun for an addition to the list: "a commit"."""


REGISTRIES: PluginSet[Callable[[str], Registry]] = PluginSet("registry", "compress.registry")


def open_registry(url: str) -> Registry:
    """Return the registry of a URL, by its scheme. Nothing is read or written yet.

    Raises:
        UsageError: the URL is malformed or nothing serves its scheme.
    """
    scheme, place = parse_registry(url)
    return REGISTRIES.get(scheme)(place)
