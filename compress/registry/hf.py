"""A model repository of the Hugging Face hub: `hf://org/name:tag`, one repository for each name, private
unless it is there already.

    commit on main        the files of one artifact, as any program loads them, in one step; what the artifact
                          before it had besides is deleted
    .compress/evidence/   the files of its evidence, below the digest of their manifest
    .compress/index.json  {"tags": {tag: manifest},
                           "manifests": {digest: {"commit", "image", "folder", "subject"}}}
                          written by a second commit, which moves all tags in one step. It is made on top
                          of the commit that was read, or not at all, and again where others came first.

So a tag means files at a commit, and what somebody changes on main by hand changes no tag. Files above the
size that git stores well travel as large files, of which the hub keeps one copy a digest. Tags are no
branches of git: `hf://org/name@revision` of a recipe is a commit or a branch. Needs no extra; the token is
that of `hf auth login` or HF_TOKEN.
"""

import contextlib
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from compress.artifact.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES
from compress.digest import digest_bytes
from compress.errors import LockHeld, StorageError, UsageError
from compress.registry.image import IMAGE_MANIFEST, Descriptor, ImageManifest
from compress.registry.protocol import REGISTRIES, Tag
from compress.registry.ref import check_name, check_tag
from compress.registry.upload import changed_source, open_source
from compress.untrusted.fields import Fields
from compress.untrusted.files import open_plain, read_bytes
from compress.untrusted.parse import Malformed, parse_json
from compress.untrusted.text import one_line

if TYPE_CHECKING:
    from huggingface_hub import HfApi

INDEX_NAME = ".compress/index.json"
_MAX_ATTEMPTS = 60
_PAUSE_S = 0.3
_MAX_INDEX_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class _Stored:
    """A manifest of the index: its bytes, the commit that has its files, and the folder they are in."""

    commit: str
    image: bytes
    folder: str
    subject: str | None


@dataclass(frozen=True)
class _Index:
    """The content of `.compress/index.json` at one commit of main (None: no repository or no commit)."""

    head: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    manifests: Mapping[str, _Stored] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        manifests = {
            digest: {
                "commit": each.commit,
                "image": each.image.decode(),
                "folder": each.folder,
                "subject": each.subject,
            }
            for digest, each in self.manifests.items()
        }
        return (
            json.dumps({"schema": 1, "tags": dict(self.tags), "manifests": manifests}, indent=1) + "\n"
        ).encode()


class Hf:
    """The repositories of one user or organization; with a name, one of them."""

    num_transfers = 4
    push_makes = "a commit that replaces the files of main"

    def __init__(self, api: "HfApi", owner: str, name: str = "") -> None:
        self._api = api
        self._owner = owner
        self._name = name
        self._staged: dict[str, Path | bytes] = {}
        self._read: _Index | None = None

    def __str__(self) -> str:
        return f"hf://{self._owner}/{self._name}".rstrip("/")

    @property
    def revision(self) -> str | None:
        """The commit that has the files of the newest push."""
        index = self._index()
        stored = index.manifests.get(index.tags.get("latest", ""))
        return None if stored is None else stored.commit

    def repository(self, name: str) -> "Hf":
        return self if name == self._name else Hf(self._api, self._owner, check_name(name))

    def check_place(self) -> None:
        with self._explained():
            self._api.whoami()

    def has(self, blob: Descriptor) -> bool:
        return blob.digest in self._staged or self._place(blob) is not None

    def put(self, blob: Descriptor, source: Path | bytes) -> None:
        """Compare a blob with its digest, and keep where it is for the commit; large ones are sent then."""
        hasher = hashlib.sha256()
        with open_source(blob, source, str(self)) as reading:
            while chunk := reading.read(_CHUNK_BYTES):
                hasher.update(chunk)
        if "sha256:" + hasher.hexdigest() != blob.digest:
            raise changed_source(blob)
        self._staged[blob.digest] = source

    @contextlib.contextmanager
    def get(self, blob: Descriptor) -> Iterator[BinaryIO]:
        if blob.digest in self._staged:
            with open_source(blob, self._staged[blob.digest], str(self)) as reading:
                yield reading
            return
        place = self._place(blob)
        if place is None:
            raise StorageError(f"the {blob} is not in {self}; push the artifact again.")
        if isinstance(place, bytes):
            yield BytesIO(place)
            return
        commit, path = place
        with self._explained():
            file = Path(self._api.hf_hub_download(self._repo, path, revision=commit))
        with open_plain(file) as stream:
            yield stream

    def find(self, digest: str) -> Descriptor | None:
        stored = self._index().manifests.get(digest)
        if stored is None:
            return None
        image = ImageManifest.from_bytes(stored.image, f"a manifest of {self}")
        return Descriptor(IMAGE_MANIFEST, digest, len(stored.image), artifact_type=image.artifact_type)

    def read_tag(self, name: str, tag: str) -> Descriptor | None:
        repository = self.repository(name)
        digest = repository._index(fresh=True).tags.get(tag)
        return None if digest is None else repository.find(digest)

    def write_tag(self, name: str, tags: Sequence[str], manifest: Descriptor) -> None:
        self.repository(name)._move(tags, manifest, lambda index: True)

    def write_tag_if(
        self, name: str, tags: Sequence[str], manifest: Descriptor, *, guard: str, expected: str | None
    ) -> bool:
        return self.repository(name)._move(tags, manifest, lambda index: index.tags.get(guard) == expected)

    def tags(self) -> tuple[Tag, ...]:
        if not self._name:
            with self._explained():
                names = [each.id.partition("/")[2] for each in self._api.list_models(author=self._owner)]
            found = [tag for name in names for tag in self.repository(name).tags()]
            if not found:
                raise UsageError(
                    f"{self} holds no artifact of compress yet; the first push makes a repository."
                )
            return tuple(sorted(found, key=lambda item: (item.name, item.tag)))
        tags = []
        for tag in sorted(self._index(fresh=True).tags):
            with contextlib.suppress(UsageError):
                manifest = self.read_tag(self._name, check_tag(tag))
                if manifest is not None:
                    tags.append(Tag(self._name, tag, manifest))
        return tuple(tags)

    def attach(self, manifest: Descriptor, subject: Descriptor) -> None:
        self._make()
        stored = self._index(fresh=True).manifests.get(manifest.digest) or self._commit_evidence(
            manifest, subject.digest
        )

        def newest(index: _Index) -> _Index:
            others = {key: each for key, each in index.manifests.items() if key != manifest.digest}
            return _Index(index.head, index.tags, {**others, manifest.digest: stored})

        self._change(newest)

    def attached(self, subject: Descriptor) -> tuple[Descriptor, ...]:
        found = [key for key, each in self._index().manifests.items() if each.subject == subject.digest]
        return tuple(each for key in found if (each := self.find(key)) is not None)

    def _move(self, tags: Sequence[str], manifest: Descriptor, allowed: Callable[[_Index], bool]) -> bool:
        """Commit the files of a manifest where they are not there, then point tags to it if the index allows
        that; return whether it did.
        """
        self._make()
        index = self._index(fresh=True)
        if not allowed(index):
            return False
        stored = index.manifests.get(manifest.digest) or self._commit_files(manifest)
        moved = True

        def move(index: _Index) -> _Index:
            nonlocal moved
            moved = allowed(index)
            if not moved:
                return index
            known = {**index.manifests, manifest.digest: index.manifests.get(manifest.digest, stored)}
            return _Index(index.head, {**index.tags, **dict.fromkeys(tags, manifest.digest)}, known)

        self._change(move)
        self._staged.clear()
        return moved

    @property
    def _repo(self) -> str:
        return f"{self._owner}/{self._name}"

    def _index(self, *, fresh: bool = False) -> _Index:
        if self._read is None or fresh:
            self._read = self._read_index()
        return self._read

    def _read_index(self) -> _Index:
        """Return the index at the head of main, an empty one where there is none."""
        from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

        try:
            with self._explained(passed=(EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError)):
                head = self._api.model_info(self._repo, revision="main").sha
                file = Path(self._api.hf_hub_download(self._repo, INDEX_NAME, revision=head))
        except EntryNotFoundError:
            return _Index(head)
        except (RepositoryNotFoundError, RevisionNotFoundError):
            return _Index()
        return _parsed(read_bytes(file, max_bytes=_MAX_INDEX_BYTES), head, f"{INDEX_NAME} of {self}")

    def _place(self, blob: Descriptor) -> tuple[str, str] | bytes | None:
        """Return the commit and path of a blob, or a manifest itself; None where the index has neither."""
        manifests = self._index().manifests
        if blob.digest in manifests:
            return manifests[blob.digest].image
        for stored in manifests.values():
            image = ImageManifest.from_bytes(stored.image, f"a manifest of {self}")
            if image.config.digest == blob.digest:
                return b"{}" if stored.subject else (stored.commit, MANIFEST_NAME)
            for layer in image.layers:
                if layer.digest == blob.digest:
                    return stored.commit, f"{stored.folder}{layer.title}"
        return None

    def _make(self) -> None:
        with self._explained():
            self._api.create_repo(self._repo, private=True, repo_type="model", exist_ok=True)

    def _commit_files(self, manifest: Descriptor) -> _Stored:
        """Replace the files on main by those of an artifact, in one commit."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        data = self._staged_bytes(manifest)
        image = ImageManifest.from_bytes(data, f"manifest {manifest.digest}")
        files = {str(layer.title): self._source_of(layer) for layer in image.layers}
        files[MANIFEST_NAME] = self._source_of(image.config)
        added = [(path, _uploadable(source)) for path, source in files.items()]

        def operations(head: str | None) -> list[Any]:
            there = self._api.list_repo_files(self._repo, revision=head)
            gone = [each for each in there if each not in files and not _stays(each)]
            return [*map(CommitOperationDelete, gone), *(CommitOperationAdd(*each) for each in added)]

        commit = self._commit(lambda index: operations(index.head), f"Artifact {image.config.digest}")
        return _Stored(commit, data, "", None)

    def _commit_evidence(self, manifest: Descriptor, subject: str) -> _Stored:
        from huggingface_hub import CommitOperationAdd

        digest = manifest.digest
        data = self._staged_bytes(manifest)
        image = ImageManifest.from_bytes(data, f"manifest {digest}")
        folder = f".compress/evidence/{digest.removeprefix('sha256:')}/"
        added = [(f"{folder}{layer.title}", _uploadable(self._source_of(layer))) for layer in image.layers]
        commit = self._commit(
            lambda index: [CommitOperationAdd(*each) for each in added], f"Evidence {digest}"
        )
        return _Stored(commit, data, folder, subject)

    def _source_of(self, blob: Descriptor) -> Path | bytes:
        """Return a staged file; of one that was committed before, its copy in the cache."""
        if blob.digest in self._staged:
            return self._staged[blob.digest]
        with self.get(blob) as stream:
            return stream.read() if blob.size_bytes <= MAX_MANIFEST_BYTES else Path(stream.name)

    def _staged_bytes(self, manifest: Descriptor) -> bytes:
        data = self._staged.get(manifest.digest)
        if not isinstance(data, bytes) or digest_bytes(data) != manifest.digest:
            raise StorageError(f"the manifest {manifest.digest} is not in {self}; push the artifact again.")
        return data

    def _change(self, edit: Callable[[_Index], _Index]) -> None:
        """Replace the index by what `edit` returns for it."""
        from huggingface_hub import CommitOperationAdd

        def operations(index: _Index) -> list[Any]:
            changed = edit(index)
            return [] if changed == index else [CommitOperationAdd(INDEX_NAME, changed.to_bytes())]

        self._commit(operations, "Tags")

    def _commit(self, operations: Callable[[_Index], list[Any]], message: str) -> str:
        """Return the commit made on top of the one that was read, again where others came first; the head
        where there is nothing to commit.
        """
        from huggingface_hub.errors import HfHubHTTPError

        for _ in range(_MAX_ATTEMPTS):
            index = self._index(fresh=True)
            try:
                with self._explained(passed=(HfHubHTTPError,)):
                    wanted = operations(index)
                    if not wanted:
                        return str(index.head)
                    done = self._api.create_commit(
                        self._repo, wanted, commit_message=message, parent_commit=index.head
                    )
                self._read = None
                return str(done.oid)
            except HfHubHTTPError as error:
                if error.response.status_code not in (409, 412):
                    raise self._refusal(error) from None
            time.sleep(random.uniform(0, _PAUSE_S))
        raise LockHeld(f"others push to {self} all the time; try again.")

    @contextlib.contextmanager
    def _explained(self, *, passed: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Turn errors of the client into those of a registry; those in `passed` go on."""
        # HTTPError is that of the HTTP client, which differs between versions
        from huggingface_hub.errors import (  # type: ignore[attr-defined]
            HFValidationError,
            HTTPError,
            LocalEntryNotFoundError,
        )

        try:
            yield
        except HFValidationError as error:
            raise UsageError(
                f"'{self._repo}' cannot be a repository of the hub: {one_line(str(error))}"
            ) from None
        except LocalEntryNotFoundError as error:  # the hub did not answer; it is one of EntryNotFoundError
            raise self._refusal(error) from None
        except passed:
            raise
        except (HTTPError, OSError) as error:
            raise self._refusal(error) from None

    def _refusal(self, error: Exception) -> StorageError:
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        return StorageError(f"{self} cannot be used: {one_line(lines[0])[:200].rstrip('.')}.")


def _parsed(data: bytes, head: str | None, where: str) -> _Index:
    try:
        value = Fields(parse_json(data), where, StorageError)
    except Malformed as error:
        raise StorageError(f"{where} is damaged ({error}).") from None
    tags = value.mapping("tags")
    manifests = {}
    for digest, raw in value.mapping("manifests").items():
        each = Fields(raw, where, StorageError)
        image = each.text("image").encode()
        folder = each.text("folder")
        if digest_bytes(image) != digest or folder not in ("", f".compress/evidence/{digest[7:]}/"):
            raise StorageError(f"{where} is damaged: a manifest is not what its digest says.")
        subject = each.text("subject") if each.has("subject") else None
        manifests[digest] = _Stored(each.text("commit"), image, folder, subject)
    if not all(isinstance(digest, str) and digest in manifests for digest in tags.values()):
        raise StorageError(f"{where} is damaged: a tag names no manifest.")
    return _Index(head, tags, manifests)


def _stays(path: str) -> bool:
    """Return whether a file of main belongs to no artifact."""
    return path == ".gitattributes" or path.startswith(".compress/")


def _uploadable(source: Path | bytes) -> str | bytes:
    return source if isinstance(source, bytes) else str(source)


@REGISTRIES.register("hf")
def open_hf(place: str) -> Hf:
    """Return the registry of `hf://owner`; a reference is `hf://owner/name:tag`."""
    from huggingface_hub import HfApi

    if "/" in place:
        raise UsageError(f"'hf://{place}' is not an owner on the hub; write hf://owner/name:tag.")
    return Hf(HfApi(), place)
