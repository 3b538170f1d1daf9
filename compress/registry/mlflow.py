"""A registry of models in an MLflow server, by reference: `mlflow+https://host/STORE`, where STORE is the URL
of an OCI registry or of S3 storage that keeps the weights, such as

    mlflow+http://localhost:5000/oci://registry.example/models/my-model:candidate

A registered model names its store, so later references may leave it out: `mlflow+http://localhost:5000/my-model`.

    version    one for each artifact that was newest; its source is the artifact in the store, by digest
    alias      a tag, but for `latest`, which is the newest version. Each moves in one step.
    tags       `compress.manifest`, `compress.artifact`, `compress.evidence`, and `gate.<name>` of evidence
    run        the metrics of the evidence, and its report as an artifact of the run

Everything that a version states of its weights is compared with digests when they are pulled. The server's
credentials are those of its client (MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_TOKEN, ...). A redirect is not
followed, because the client would send what it writes to any host.
"""

import contextlib
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from compress.errors import StorageError, UsageError
from compress.plugins import check_extra
from compress.registry.blobs import copy_blob, read_blob
from compress.registry.image import EVIDENCE, IMAGE_MANIFEST, Descriptor, ImageManifest
from compress.registry.protocol import REGISTRIES, Registry, Tag, open_registry
from compress.registry.ref import DEFAULT_TAG, Ref, check_name, check_tag, parse_ref
from compress.registry.resuming import Dropped, persist
from compress.untrusted.parse import Malformed, parse_json
from compress.untrusted.text import one_line

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

STORES = ("oci", "oci+http", "s3", "s3+http")
"""Schemes of registries that may keep the weights."""
EXPERIMENT = "compress"
_PLACE = re.compile(r"(?P<server>[^/]+(?:/(?![a-z0-9+.-]+://)[^/]+)*)(?:/(?P<store>[a-z][a-z0-9+.-]*://.+))?")
_MISSING = ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND")
_THERE = ("RESOURCE_ALREADY_EXISTS",)
_MAX_REPORT_BYTES = 64 << 20
_PAGE = 1000


@dataclass(frozen=True)
class _Proof:
    """Evidence as MLflow shows it: name, words and value of each gate, and the page."""

    digest: str
    gates: tuple[tuple[str, str, float | None], ...]
    report: Descriptor | None

    @property
    def tags(self) -> dict[str, str]:
        """The tags of a version with this evidence."""
        return {
            **{f"gate.{name}": words for name, words, _ in self.gates},
            "compress.evidence": self.digest,
        }


class Mlflow:
    """The registered models of one server; with a name, one of them."""

    num_transfers = 4
    push_makes = "a version of a registered model"

    def __init__(self, server: str, store: str | None, name: str = "") -> None:
        self._server = server
        self._store_url = store
        self._name = name
        self._source: Registry | None = None
        self._opened: MlflowClient | None = None

    def __str__(self) -> str:
        return self._server

    def repository(self, name: str) -> "Mlflow":
        if name == self._name:
            return self
        bound = Mlflow(self._server, self._store_url, check_name(name))
        bound._opened = self._opened
        return bound

    def check_place(self) -> None:
        with self._explained():
            self._client.search_registered_models(max_results=1)
        if self._store_url is not None:
            self._open_store(self._store_url).check_place()

    def has(self, blob: Descriptor) -> bool:
        return self._store.has(blob)

    def put(self, blob: Descriptor, source: Path | bytes) -> None:
        self._store.put(blob, source)

    def get(self, blob: Descriptor) -> AbstractContextManager[BinaryIO]:
        return self._store.get(blob)

    def find(self, digest: str) -> Descriptor | None:
        return self._store.find(digest)

    def attach(self, manifest: Descriptor, subject: Descriptor) -> None:
        self._store.attach(manifest, subject)

    def attached(self, subject: Descriptor) -> tuple[Descriptor, ...]:
        return self._store.attached(subject)

    def read_tag(self, name: str, tag: str) -> Descriptor | None:
        """Return the manifest of a version, by alias, by number, or of the newest one (`latest`)."""
        version = self._version_of(check_name(name), tag)
        if version is None:
            return None
        self._source = self._open_store(_source_of(version).registry).repository(_source_of(version).name)
        manifest = _manifest_of(version)
        if self._source.find(manifest.digest) is None:
            raise StorageError(
                f"version {version.version} of '{name}' in {self} names the manifest {manifest.digest}, "
                "which the store of its weights does not have; push the artifact again."
            )
        return manifest

    def write_tag(self, name: str, tags: Sequence[str], manifest: Descriptor) -> None:
        model = self.repository(name)
        if odd := [tag for tag in tags if tag.isdigit() or re.fullmatch(r"v[0-9]+", tag)]:
            raise UsageError(f"the tag '{odd[0]}' names a version in MLflow; choose another.")
        # a tag of its own, or a registry that removes what has no tag would remove old versions
        model._store.write_tag(name, (f"kept-{manifest.digest.removeprefix('sha256:')[:32]}",), manifest)
        image = ImageManifest.from_bytes(read_blob(model._store, manifest), f"manifest {manifest.digest}")
        with self._explained():
            proof = model._read_proof(manifest)
            version = model._find_version(manifest, newest=DEFAULT_TAG in tags)
            if version is None:
                version = model._new_version(manifest, image, proof)
            elif proof is not None and version.tags.get("compress.evidence") != proof.digest:
                tags_of_proof = {**proof.tags, "compress.run": model._log_run(proof)}
                for key, value in tags_of_proof.items():
                    self._client.set_model_version_tag(name, version.version, key, value)
            for tag in tags:
                if tag != DEFAULT_TAG:
                    self._client.set_registered_model_alias(name, tag, version.version)

    def tags(self) -> tuple[Tag, ...]:
        found = []
        with self._explained():
            wanted = f"name='{self._name}'" if self._name else None
            models = self._client.search_registered_models(filter_string=wanted, max_results=_PAGE)
        for model in models:
            for tag in (DEFAULT_TAG, *model.aliases):
                with contextlib.suppress(UsageError, StorageError):  # models of other programs
                    version = self._version_of(check_name(model.name), check_tag(tag))
                    if version is not None:
                        found.append(Tag(model.name, tag, _manifest_of(version)))
        if not found and not self._name:
            raise UsageError(f"{self} holds no artifact of compress yet; the first push makes a model.")
        return tuple(sorted(found, key=lambda item: (item.name, item.tag)))

    @property
    def _client(self) -> "MlflowClient":
        if self._opened is None:
            # or its import reports itself, and the end of a run prints to stdout
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
            os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
            os.environ.setdefault("MLFLOW_ALLOW_HTTP_REDIRECTS", "false")
            from mlflow import MlflowClient

            self._opened = MlflowClient(tracking_uri=self._server, registry_uri=self._server)
        return self._opened

    @property
    def _store(self) -> Registry:
        """The registry that keeps the weights: of the version that was read, of the reference, or of the
        model.
        """
        if self._source is None:
            url = self._store_url or self._stored_url()
            if url is None:
                raise UsageError(
                    f"the model '{self._name}' in {self} names no store for its weights; write one into the "
                    f"reference: mlflow+{self._server}/oci://host/path/{self._name}."
                )
            self._source = self._open_store(url).repository(self._name)
        return self._source

    def _stored_url(self) -> str | None:
        with self._explained(_MISSING):
            url = self._client.get_registered_model(self._name).tags.get("compress.store")
            return url if isinstance(url, str) else None
        raise UsageError(f"{self} has no model '{self._name}'.")

    def _open_store(self, url: str) -> Registry:
        if url.partition("://")[0] not in STORES:
            raise UsageError(
                f"'{one_line(url)[:100]}' cannot keep the weights of a model in MLflow; use "
                f"{', '.join(STORES)}."
            )
        return open_registry(url)

    def _versions(self, name: str) -> list["ModelVersion"]:
        """Return the versions that this program made, newest first."""
        # an answer that ends in its headers is an empty one to the client, so that of none is requested twice
        found = persist(lambda: self._search_versions(name)) or persist(lambda: self._search_versions(name))
        ours = [each for each in found if "compress.manifest" in each.tags]
        return sorted(ours, key=lambda each: int(each.version), reverse=True)

    def _search_versions(self, name: str) -> Sequence["ModelVersion"]:
        with self._explained():
            return self._client.search_model_versions(f"name='{name}'", max_results=_PAGE)

    def _version_of(self, name: str, tag: str) -> "ModelVersion | None":
        if tag == DEFAULT_TAG:
            return next(iter(self._versions(name)), None)
        return persist(lambda: self._named_version(name, tag))

    def _named_version(self, name: str, tag: str) -> "ModelVersion | None":
        with self._explained((*_MISSING, "INVALID_PARAMETER_VALUE")):
            if tag.isdigit():
                version = self._client.get_model_version(name, tag)
            else:
                version = self._client.get_model_version_by_alias(name, tag)
            if not version.version:  # the client takes an answer that ends in its headers for an empty one
                raise Dropped(f"the connection to {self} was lost.")
            return version
        return None

    def _find_version(self, manifest: Descriptor, *, newest: bool) -> "ModelVersion | None":
        versions = self._versions(self._name)[: 1 if newest else None]
        same = (each for each in versions if each.tags["compress.manifest"] == manifest.digest)
        return next(same, None)

    def _new_version(
        self, manifest: Descriptor, image: ImageManifest, proof: "_Proof | None"
    ) -> "ModelVersion":
        """Make a version with all its tags, which is visible from then on; its run is made before it."""
        store = self._store_url or self._stored_url()
        with self._explained(_THERE):
            self._client.create_registered_model(self._name)
        self._client.set_registered_model_tag(self._name, "compress.store", store)
        ref = parse_ref(f"{store}/{self._name}").pinned(manifest.digest)
        run_id = None if proof is None else self._log_run(proof)
        tags = {
            "compress.manifest": manifest.digest,
            "compress.manifest_bytes": str(manifest.size_bytes),
            "compress.artifact": image.config.digest,
            **({} if proof is None or run_id is None else {**proof.tags, "compress.run": run_id}),
        }
        return self._client.create_model_version(
            self._name, source=str(ref), run_id=run_id, tags=tags, await_creation_for=0
        )

    def _read_proof(self, manifest: Descriptor) -> "_Proof | None":
        """Return gates and report of the newest evidence of an artifact; None where there is none."""
        attached = [each for each in self._store.attached(manifest) if each.artifact_type == EVIDENCE]
        if not attached:
            return None
        image = ImageManifest.from_bytes(read_blob(self._store, attached[-1]), "evidence")
        files = {layer.title: layer for layer in image.layers}
        gates = _gates_in(read_blob(self._store, files["report.json"])) if "report.json" in files else []
        return _Proof(attached[-1].digest, tuple(gates), files.get("report.html"))

    def _log_run(self, proof: "_Proof") -> str:
        """Make a run with the metrics and the report of evidence, and return its id."""
        client = self._client
        found = client.get_experiment_by_name(EXPERIMENT)
        experiment = found.experiment_id if found is not None else client.create_experiment(EXPERIMENT)
        run_id = str(client.create_run(experiment, run_name=f"{self._name} {proof.digest[7:19]}").info.run_id)
        for name, _, value in proof.gates:
            if value is not None:
                client.log_metric(run_id, name, value)
        if proof.report is not None and proof.report.size_bytes <= _MAX_REPORT_BYTES:
            with tempfile.TemporaryDirectory() as directory:
                file = Path(directory) / "report.html"
                with file.open("wb") as sink:
                    copy_blob(self._store, proof.report, sink)
                client.log_artifact(run_id, str(file))
        client.set_terminated(run_id)
        return run_id

    @contextlib.contextmanager
    def _explained(self, passed: Sequence[str] = ()) -> Iterator[None]:
        """Turn errors of the client into those of a registry; codes in `passed` end the block quietly."""
        self._client  # noqa: B018  imports the package before its errors are named
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            if error.error_code not in passed:
                reason = one_line(str(error.message)).partition(" with url")[0][:200].rstrip(".")
                if " failed with exception " in reason:
                    raise Dropped(f"the connection to {self} was lost: {reason}.") from None
                raise StorageError(f"the MLflow server at {self} refuses: {reason}.") from None


def _source_of(version: "ModelVersion") -> Ref:
    """Return where the weights of a version are, as the server states it."""
    return parse_ref(str(version.source))


def _manifest_of(version: "ModelVersion") -> Descriptor:
    tags: Mapping[str, str] = version.tags
    size = tags.get("compress.manifest_bytes", "")
    value = {
        "mediaType": IMAGE_MANIFEST,
        "digest": tags.get("compress.manifest"),
        "size": int(size) if size.isdigit() and len(size) < 12 else None,
    }
    return Descriptor.from_json(value, f"version {version.version} of '{version.name}' in MLflow")


def _gates_in(report: bytes) -> list[tuple[str, str, float | None]]:
    """Return name, outcome in words, and value of each gate of a report."""
    try:
        document: Any = parse_json(report)
    except Malformed:
        return []
    found = []
    for gate in document.get("gates", []) if isinstance(document, dict) else []:
        name = str(gate.get("name", ""))
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", name):
            continue
        value = gate.get("value")
        number = float(value) if isinstance(value, int | float) and math.isfinite(value) else None
        passed = {True: "pass", False: "fail"}.get(gate.get("passed"), "not decided")
        words = f"{passed}: {value} {gate.get('relation', '')} {gate.get('limit')}"
        found.append((name, one_line(words)[:500], number))
    return found


def _open(place: str, *, scheme: str) -> Mlflow:
    check_extra("mlflow", extra="mlflow", needed_by="registries of this kind")
    match = _PLACE.fullmatch(place)
    if match is None:
        raise UsageError(
            f"'{place}' is not an MLflow server; write mlflow+{scheme}://host:port/name, or before the first "
            f"push mlflow+{scheme}://host:port/oci://registry/path/name."
        )
    return Mlflow(f"{scheme}://{match['server']}", match["store"])


@REGISTRIES.register("mlflow+http")
def open_mlflow_without_tls(place: str) -> Mlflow:
    """Return the registry of `mlflow+http://host[:port][/STORE]`."""
    return _open(place, scheme="http")


@REGISTRIES.register("mlflow+https")
def open_mlflow(place: str) -> Mlflow:
    """Return the registry of `mlflow+https://host[:port][/STORE]`."""
    return _open(place, scheme="https")
