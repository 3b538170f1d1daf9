"""A registry that serves the OCI distribution API 1.1: `oci://host:port/path`, with a repository `path/name`
for each name. Over TLS, or `oci+http://` without it (distribution.py).

    blobs, manifests   by digest; what is there already is not sent, what a neighbour has is mounted
    name:tag           the tag of a manifest. Each tag moves in one step; a push that is killed between two
                       of them leaves each on a whole artifact. The API cannot compare a tag first.
    name:tag.modelpack the same files as a ModelPack manifest, which other programs pull (modelpack.py)
    evidence           by the Referrers API; `evidence-<hex>` names the newest, because the API has no order,
                       and `signature-<hex>` the newest signature.
                       Where the API is missing, in the index `sha256-<hex>` of the fallback tag scheme. Of
                       two that attach at once each reads the index again, and repeats where its own is lost.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urljoin

from compress.artifact.manifest import MAX_MANIFEST_BYTES, Manifest
from compress.digest import canonical_json, digest_bytes
from compress.errors import StorageError, UsageError
from compress.plugins import check_extra
from compress.registry.distribution import BodySource, Distribution, Request
from compress.registry.image import (
    ARTIFACT,
    IMAGE_INDEX,
    IMAGE_MANIFEST,
    SIGNATURE,
    Descriptor,
    ImageManifest,
)
from compress.registry.modelpack import MODELPACK_SUFFIX, modelpack_image
from compress.registry.protocol import REGISTRIES, Tag
from compress.registry.ref import check_name, check_tag
from compress.registry.resuming import ResumingStream, Source
from compress.registry.upload import Upload, open_source

_COMPONENT = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_SERVICE_TAG = re.compile(rf"(?:sha256|evidence|signature)-[0-9a-f]{{40,64}}|.*{re.escape(MODELPACK_SUFFIX)}")
_NEXT = re.compile(r'<([^>]+)>;\s*rel="?next"?')
_OURS = "application/vnd.compress."  # others attach signatures and lists of parts
_MANIFEST_TYPES = (IMAGE_MANIFEST, IMAGE_INDEX)
_ACCEPT = {"Accept": ", ".join(_MANIFEST_TYPES)}
_MAX_PAGES = 20
_MAX_NEIGHBOURS = 8
_MOUNTED_BYTES = 64 << 10  # a smaller blob is sent sooner than a neighbour is found
_MAX_ATTEMPTS = 5


class Oci:
    """The repositories below one path of a host; with `repository`, one of them."""

    num_transfers = 4

    def __init__(self, client: Distribution, path: str, repository: str = "") -> None:
        self._client = client
        self._path = path
        self._repository = repository
        self._manifests: dict[str, bytes] = {}
        self._neighbours: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"oci://{self._client.host}/{self._repository or self._path}"

    def repository(self, name: str) -> "Oci":
        path = f"{self._path}/{check_name(name)}" if self._path else check_name(name)
        if not all(_COMPONENT.fullmatch(part) for part in path.split("/")):
            raise UsageError(
                f"'{path}' cannot be a repository of an OCI registry; use lower-case letters, digits, "
                "and '.', '_' or '-' between them."
            )
        return self if path == self._repository else Oci(self._client, self._path, path)

    def check_place(self) -> None:
        self._client.send_persistently(Request("GET", "/v2/", self._repository, accepted=(200,)))

    def has(self, blob: Descriptor) -> bool:
        kind = "manifests" if blob.media_type in _MANIFEST_TYPES else "blobs"
        request = self._request("HEAD", f"{kind}/{blob.digest}", accepted=(200, 404), headers=_ACCEPT)
        response = self._client.send_persistently(request)
        return response.status_code == 200 and response.headers.get("Content-Length") == str(blob.size_bytes)

    def put(self, blob: Descriptor, source: Path | bytes) -> None:
        with open_source(blob, source, str(self)) as reading:
            if blob.media_type in _MANIFEST_TYPES:
                self._put_manifest(blob, reading.read(MAX_MANIFEST_BYTES + 1), blob.digest)
            else:
                Upload(self._client, self._repository, blob, reading).run(self._neighbour_with(blob))

    @contextlib.contextmanager
    def get(self, blob: Descriptor) -> Iterator[BinaryIO]:
        if blob.media_type in _MANIFEST_TYPES:
            data = self._read_manifest(blob.digest)
            if data is None:
                raise StorageError(f"the {blob} is not in {self}; push the artifact again.")
            yield BytesIO(data)
            return
        stream = ResumingStream(lambda position: self._open_at(blob, position), blob.size_bytes)
        with stream.begin():
            yield cast(BinaryIO, stream)

    def find(self, digest: str) -> Descriptor | None:
        return self._described(self._read_manifest(digest))

    def read_tag(self, name: str, tag: str) -> Descriptor | None:
        return self.repository(name)._described(self.repository(name)._read_manifest(tag))

    def write_tag(self, name: str, tags: Sequence[str], manifest: Descriptor) -> None:
        repository = self.repository(name)
        if odd := [tag for tag in tags if _SERVICE_TAG.fullmatch(tag)]:
            raise UsageError(
                f"the tag '{odd[0]}' has a meaning of its own in an OCI registry; choose another."
            )
        data = repository._read_manifest(manifest.digest)
        if data is None:
            raise StorageError(f"the manifest {manifest.digest} is not in {repository}; push again.")
        repository._put_modelpack(data, tags)
        for tag in tags:
            repository._put_manifest(manifest, data, tag)

    def tags(self) -> tuple[Tag, ...]:
        """Return every tag, sorted; of all repositories below the path, where the host lists them."""
        repositories = (self._repository,) if self._repository else self._catalog()
        found = []
        for path in repositories:
            name = path.rpartition("/")[2]
            for tag in self._tags_of(path):
                manifest = self.read_tag(name, tag)
                if manifest is not None:
                    found.append(Tag(name, tag, manifest))
        if not found and not self._repository:
            raise UsageError(f"{self} holds no repository yet; the first push creates one.")
        return tuple(sorted(found, key=lambda item: (item.name, item.tag)))

    def attach(self, manifest: Descriptor, subject: Descriptor) -> None:
        if self._referrers(subject) is not None:
            data = self._read_manifest(manifest.digest)
            if data is None:
                raise StorageError(f"the manifest {manifest.digest} is not in {self}; push again.")
            self._put_manifest(manifest, data, _newest_tag(subject, manifest.artifact_type))
            return
        for _ in range(_MAX_ATTEMPTS):
            entries = [each for each in self._fallback(subject) if each.digest != manifest.digest]
            self._put_index([*entries, manifest], _fallback_tag(subject))
            if manifest in self._fallback(subject):
                return
        raise StorageError(f"others attach evidence to {subject.digest} in {self} all the time; push again.")

    def attached(self, subject: Descriptor) -> tuple[Descriptor, ...]:
        found = self._referrers(subject)
        if found is None:
            found = self._fallback(subject)
        proofs = [each for each in found if (each.artifact_type or _OURS).startswith(_OURS)]
        tags = {_newest_tag(subject, each.artifact_type) for each in proofs}
        newest = {digest_bytes(data) for tag in tags if (data := self._read_manifest(tag)) is not None}
        return tuple(sorted(proofs, key=lambda each: each.digest in newest))

    def _request(
        self,
        method: str,
        path: str,
        *,
        accepted: tuple[int, ...] = (200,),
        headers: dict[str, str] | None = None,
        body: bytes = b"",
        stream: bool = False,
    ) -> Request:
        actions = "pull" if method in ("GET", "HEAD") else "pull,push"
        full = f"/v2/{self._repository}/{path}"
        return Request(method, full, self._repository, actions, accepted, headers or {}, body, stream)

    def _read_manifest(self, reference: str) -> bytes | None:
        """Return the bytes of a manifest by tag or digest, compared with the digest that the host states."""
        if reference in self._manifests:
            return self._manifests[reference]
        request = self._request("GET", f"manifests/{reference}", accepted=(200, 404), headers=_ACCEPT)
        response = self._client.send_persistently(request)
        if response.status_code == 404:
            response.close()
            return None
        data = self._client.content(response, max_bytes=MAX_MANIFEST_BYTES)
        stated = response.headers.get("Docker-Content-Digest")
        by_digest = reference if ":" in reference else None
        for wanted in (stated, by_digest):
            if wanted is not None and wanted != digest_bytes(data):
                raise StorageError(
                    f"the manifest {wanted[:80]} in {self} is damaged: its content has digest "
                    f"{digest_bytes(data)}; push the artifact again to repair it."
                )
        if by_digest is not None:
            self._manifests[by_digest] = data
        return data

    def _described(self, data: bytes | None) -> Descriptor | None:
        return None if data is None else Descriptor(IMAGE_MANIFEST, digest_bytes(data), len(data))

    def _put_manifest(self, manifest: Descriptor, data: bytes, reference: str) -> None:
        if digest_bytes(data) != manifest.digest:
            raise StorageError(f"the manifest {manifest.digest} has changed since it was described.")
        self._client.send_persistently(
            self._request(
                "PUT",
                f"manifests/{reference}",
                accepted=(201,),
                headers={"Content-Type": manifest.media_type},
                body=data,
            )
        )

    def _put_index(self, entries: Sequence[Descriptor], tag: str) -> None:
        manifests = [each.to_json() for each in entries]
        data = canonical_json({"schemaVersion": 2, "mediaType": IMAGE_INDEX, "manifests": manifests})
        self._put_manifest(Descriptor(IMAGE_INDEX, digest_bytes(data), len(data)), data, tag)

    def _put_modelpack(self, data: bytes, tags: Sequence[str]) -> None:
        """Give an artifact its second manifest, with the same layers, under one more tag for each."""
        image = ImageManifest.from_bytes(data, f"a manifest in {self}")
        if image.artifact_type != ARTIFACT:
            return
        with self.get(image.config) as stream:
            manifest = Manifest.from_bytes(stream.read(image.config.size_bytes + 1), where=str(image.config))
        pack, config = modelpack_image(image, manifest)
        if not self.has(pack.config):
            self.put(pack.config, config)
        for tag in tags:
            self._put_manifest(pack.descriptor, pack.to_bytes(), f"{tag}{MODELPACK_SUFFIX}")

    def _open_at(self, blob: Descriptor, position: int) -> Source:
        headers = {"Range": f"bytes={position}-"} if position else {}
        request = self._request(
            "GET", f"blobs/{blob.digest}", accepted=(200, 206, 404, 416), headers=headers, stream=True
        )
        response = self._client.send(request)
        source = BodySource(response, self._client.host)
        if response.status_code == 404:
            source.close()
            raise StorageError(f"the {blob} is not in {self}; push the artifact again.")
        if response.status_code == 416:
            source.close()
            return BytesIO()
        if response.status_code == 206:
            if not response.headers.get("Content-Range", "").startswith(f"bytes {position}-"):
                source.close()
                raise StorageError(
                    f"{self} gives another part of the {blob} than the one that was requested."
                )
            return source
        while position > 0 and (part := source.read(min(position, 1 << 20))):  # the host knows no ranges
            position -= len(part)
        return source

    def _neighbour_with(self, blob: Descriptor) -> str | None:
        """Return a repository below the same path that has a blob, where the host lists repositories."""
        if blob.size_bytes < _MOUNTED_BYTES:
            return None
        if self._neighbours is None:
            try:
                others = [each for each in self._catalog() if each != self._repository]
            except StorageError:  # many hosts do not list; then everything is sent
                others = []
            self._neighbours = tuple(others[:_MAX_NEIGHBOURS])
        for path in self._neighbours:
            if Oci(self._client, self._path, path).has(blob):
                return path
        return None

    def _catalog(self) -> list[str]:
        start = f"{self._path}/" if self._path else ""
        names = self._listed("/v2/_catalog?n=1000", "repositories", "")
        found = [each for each in names if each.startswith(start) and "/" not in each.removeprefix(start)]
        return [each for each in found if all(_COMPONENT.fullmatch(part) for part in each.split("/"))]

    def _tags_of(self, repository: str) -> list[str]:
        found = []
        for tag in self._listed(f"/v2/{repository}/tags/list", "tags", repository):
            with contextlib.suppress(UsageError):
                if not _SERVICE_TAG.fullmatch(tag):
                    found.append(check_tag(tag))
        return found

    def _listed(self, path: str, field: str, repository: str) -> list[str]:
        found: list[str] = []
        for _ in range(_MAX_PAGES):
            response = self._client.send_persistently(Request("GET", path, repository, accepted=(200, 404)))
            if response.status_code == 404:
                response.close()
                break
            answer = self._client.document(response)
            values = answer.get(field) if isinstance(answer, dict) else None
            found += [each for each in values or [] if isinstance(each, str)]
            following = _NEXT.search(response.headers.get("Link", ""))
            if following is None:
                break
            path = _same_host(path, following[1])
        return found

    def _referrers(self, subject: Descriptor) -> list[Descriptor] | None:
        """Return what the Referrers API lists for a subject; None where the host lacks the API."""
        request = self._request("GET", f"referrers/{subject.digest}", accepted=(200, 400, 404, 405))
        response = self._client.send_persistently(request)
        if response.status_code != 200:
            response.close()
            return None
        return self._described_in(self._client.document(response))

    def _fallback(self, subject: Descriptor) -> list[Descriptor]:
        data = self._read_manifest(_fallback_tag(subject))
        if data is None:
            return []
        request = self._request("GET", f"manifests/{_fallback_tag(subject)}", headers=_ACCEPT)
        return self._described_in(self._client.document(self._client.send_persistently(request)))

    def _described_in(self, index: Any) -> list[Descriptor]:
        entries = index.get("manifests") if isinstance(index, dict) else None
        if not isinstance(entries, list):
            raise StorageError(f"{self} gave a list of referrers that is none.")
        return [
            replace(Descriptor.from_json(each, f"a list of referrers in {self}"), title=None)
            for each in entries
        ]


def _fallback_tag(subject: Descriptor) -> str:
    return subject.digest.replace(":", "-")


def _newest_tag(subject: Descriptor, artifact_type: str | None) -> str:
    kind = "signature" if artifact_type == SIGNATURE else "evidence"
    return f"{kind}-{subject.digest.removeprefix('sha256:')}"


def _same_host(path: str, following: str) -> str:
    """Return the path of the next page, which must be below the same host."""
    target = urljoin(f"https://host{path}", following)
    if not target.startswith("https://host/"):
        raise StorageError("the registry continues a list at another host; nothing is read from there.")
    return target.removeprefix("https://host")


def _open(place: str, *, plain_http: bool) -> Oci:
    check_extra("requests", extra="oci", needed_by="registries of this kind")
    host, _, path = place.partition("/")
    found = re.fullmatch(r"(?:[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?::(?P<port>[0-9]{1,5}))?", host)
    if found is None or int(found["port"] or 1) not in range(1, 1 << 16):
        raise UsageError(f"'{host}' is not a host of an OCI registry; write oci://host:port/path/name:tag.")
    return Oci(Distribution(host, plain_http=plain_http), path.strip("/"))


@REGISTRIES.register("oci")
def open_oci(place: str) -> Oci:
    """Return the registry of `oci://host[:port][/path]`."""
    return _open(place, plain_http=False)


@REGISTRIES.register("oci+http")
def open_oci_without_tls(place: str) -> Oci:
    """Return the registry of `oci+http://host[:port][/path]`, which is spoken to without TLS."""
    return _open(place, plain_http=True)
