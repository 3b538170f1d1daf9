"""What a registry has stored, in the hands of somebody who can write to its storage: a blob or manifest is
replaced by other bytes under the same digest, and the tag `model:latest` is made to name any manifest.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

from compress.digest import digest_bytes
from compress.registry.image import IMAGE_MANIFEST, REF_NAME
from tests.support import hub_server, mlflow_server, oci_server, s3_server
from tests.support.registries import use_hub


class Stored(Protocol):
    """One registry; `read` and `replace` take a digest of a blob or manifest that was pushed."""

    url: str

    def read(self, digest: str) -> bytes: ...

    def replace(self, digest: str, data: bytes) -> None: ...

    def point(self, manifest: bytes) -> None:
        """Store a manifest under its own digest, and make the tag `model:latest` name it."""
        ...


class StoredLayout:
    """The files of a layout."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        del monkeypatch
        self._root = directory / "registry"
        self.url = f"layout://{self._root}"

    def read(self, digest: str) -> bytes:
        return self._blob(digest).read_bytes()

    def replace(self, digest: str, data: bytes) -> None:
        self._blob(digest).unlink(missing_ok=True)
        self._blob(digest).write_bytes(data)

    def point(self, manifest: bytes) -> None:
        self.replace(digest_bytes(manifest), manifest)
        path = self._root / "index.json"
        path.write_bytes(_pointed(path.read_bytes(), manifest))

    def _blob(self, digest: str) -> Path:
        return self._root / "blobs" / "sha256" / digest.removeprefix("sha256:")


class StoredObjects:
    """The objects of S3 storage below one prefix."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        del directory
        self._store = s3_server.Store()
        self._prefix = "team"
        for name, value in s3_server.environment(s3_server.start(self._store)).items():
            monkeypatch.setenv(name, value)
        self.url = f"s3://{s3_server.BUCKET}/{self._prefix}"

    def read(self, digest: str) -> bytes:
        return self._store.objects[self._key(digest)]

    def replace(self, digest: str, data: bytes) -> None:
        self._store.objects[self._key(digest)] = data

    def point(self, manifest: bytes, tag: str = "latest") -> None:
        self.replace(digest_bytes(manifest), manifest)
        key = f"{self._prefix}/index.json"
        self._store.objects[key] = _pointed(self._store.objects[key], manifest, tag)

    def _key(self, digest: str) -> str:
        return f"{self._prefix}/blobs/sha256/{digest.removeprefix('sha256:')}"


class StoredOci:
    """The answers of an OCI registry, which states the digest that was pushed whatever it gives."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DOCKER_CONFIG", str(directory / "no-login"))
        self._oci = oci_server.Oci()
        self._replaced: dict[str, bytes] = {}
        self._oci.tamper = lambda path, data: self._replaced.get(digest_bytes(data), data)
        self.url = f"oci://{oci_server.start(self._oci)}/org"

    def read(self, digest: str) -> bytes:
        manifest = self._oci.manifests.get(digest)
        return self._oci.blobs[digest] if manifest is None else manifest[1]

    def replace(self, digest: str, data: bytes) -> None:
        self._replaced[digest] = data

    def point(self, manifest: bytes) -> None:
        for each in ("latest", digest_bytes(manifest)):
            self._oci.manifests[each] = (IMAGE_MANIFEST, manifest)


class StoredModels:
    """A model of MLflow: its versions in the server, its weights in S3 storage."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._weights = StoredObjects(directory, monkeypatch)
        self._tracking = mlflow_server.Tracking()
        self.url = f"mlflow+{mlflow_server.start(self._tracking)}/{self._weights.url}"
        self.read = self._weights.read
        self.replace = self._weights.replace

    def point(self, manifest: bytes) -> None:
        digest = digest_bytes(manifest)
        self._weights.point(manifest, "kept-other")
        version = self._tracking.models["model"]["versions"][-1]
        version["tags"] |= {"compress.manifest": digest, "compress.manifest_bytes": str(len(manifest))}
        version["source"] = f"{version['source'].partition('@')[0]}@{digest}"


class StoredRepository:
    """The files of a repository on the hub, at all its commits; its manifests are in its index."""

    _INDEX = ".compress/index.json"

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._hub = hub_server.Hub()
        use_hub(hub_server.start(self._hub), directory, monkeypatch)
        self.url = "hf://owner"

    def read(self, digest: str) -> bytes:
        image = self._index()["manifests"].get(digest, {}).get("image")
        if isinstance(image, str):
            return image.encode()
        files = (data for _, tree in self._commits() for data in tree.values())
        return next(data for data in files if digest_bytes(data) == digest)

    def replace(self, digest: str, data: bytes) -> None:
        index = self._index()
        if digest in index["manifests"]:
            index["manifests"][digest]["image"] = data.decode()
            self._write(index)
        for _, tree in self._commits():
            tree.update({path: data for path, old in tree.items() if digest_bytes(old) == digest})

    def point(self, manifest: bytes) -> None:
        index = self._index()
        named = index["manifests"][index["tags"]["latest"]]
        index["manifests"][digest_bytes(manifest)] = {**named, "image": manifest.decode()}
        index["tags"]["latest"] = digest_bytes(manifest)
        self._write(index)

    def _commits(self) -> list[tuple[str, dict[str, bytes]]]:
        return self._hub.repositories["owner/model"].commits

    def _index(self) -> dict[str, dict]:
        return dict(json.loads(self._commits()[-1][1][self._INDEX]))

    def _write(self, index: dict[str, dict]) -> None:
        data = json.dumps(index).encode()
        oid = hashlib.sha1(data).hexdigest()
        self._commits().append((oid, {**self._commits()[-1][1], self._INDEX: data}))


def _pointed(index: bytes, manifest: bytes, tag: str = "latest") -> bytes:
    """Return the index of a layout in which a tag of `model` names a manifest."""
    document = json.loads(index)
    name = {REF_NAME: f"model:{tag}"}
    entry = {"mediaType": IMAGE_MANIFEST, "digest": digest_bytes(manifest), "size": len(manifest)}
    others = [each for each in document["manifests"] if each.get("annotations") != name]
    return json.dumps({**document, "manifests": [*others, {**entry, "annotations": name}]}).encode()


STORED: dict[str, Callable[[Path, pytest.MonkeyPatch], Stored]] = {
    "hf": StoredRepository,
    "layout": StoredLayout,
    "mlflow+http": StoredModels,
    "oci": StoredOci,
    "s3": StoredObjects,
}
