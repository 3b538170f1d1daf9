"""Provenance as other tools read it: an in-toto statement (https://in-toto.io/Statement/v1) with the
predicate SLSA provenance v1 (https://slsa.dev/provenance/v1), made from nothing but the facts of
provenance.py.

The subjects are the files of the artifact with their SHA-256, its manifest among them. Digests that are no
SHA-256 of one file have names of their own: `compressModelV1` is that of a model's files (the SHA-256 of the
canonical JSON of {file: digest}), `compressTextV1` and `compressTokensV1` those of a text and of its windows.
"""

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from compress.artifact.manifest import Artifact
from compress.digest import canonical_json
from compress.registry.signatures import files_of_artifact

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:compress:recipe:v1"
BUILDER_ID = "urn:compress:run"


def slsa_statement(provenance: Mapping[str, Any], artifact: Artifact) -> dict[str, Any]:
    """Return the statement about an artifact; `provenance` is the document that provenance.py wrote."""
    files = files_of_artifact(artifact)
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": _sha256(files[name])} for name in sorted(files)],
        "predicateType": PREDICATE_TYPE,
        "predicate": {"buildDefinition": _definition(provenance), "runDetails": _run(provenance)},
    }


def _definition(provenance: Mapping[str, Any]) -> dict[str, Any]:
    recipe = provenance["recipe"]
    return {
        "buildType": BUILD_TYPE,
        "externalParameters": {
            "recipe": {"name": recipe["name"], "digest": _sha256(recipe["digest"])},
            **provenance["parameters"],
        },
        "internalParameters": {
            name: provenance[name] for name in ("command", "platform", "pulled") if name in provenance
        },
        "resolvedDependencies": [
            _model(provenance["source"]),
            *(_text(each) for each in provenance["texts"]),
        ],
    }


def _run(provenance: Mapping[str, Any]) -> dict[str, Any]:
    versions = {**provenance["tool"], "python": provenance["python"], **provenance["libraries"]}
    invocation = uuid.uuid5(uuid.NAMESPACE_URL, canonical_json(provenance).decode())
    return {
        "builder": {
            "id": BUILDER_ID,
            "version": {name: version for name, version in versions.items() if version is not None},
        },
        "metadata": {
            "invocationId": invocation.urn,
            "startedOn": _timestamp(provenance["started"]),
            "finishedOn": _timestamp(provenance["finished"]),
        },
        "byproducts": [
            {"name": stage, "digest": _sha256(digest)} for stage, digest in provenance["artifacts"].items()
        ],
    }


def _model(source: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": source["name"], "digest": {"compressModelV1": _hex(source["digest"])}}
    if source["uri"] is not None:
        found["uri"] = source["uri"]
    revision = source["revision"]
    if revision is not None:
        in_registry = revision.startswith("sha256:")
        found["digest"] |= _sha256(revision) if in_registry else {"gitCommit": revision}
    return found


def _text(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dependency on a text: its card by the digest of the file, or the commit of its dataset."""
    digest = {
        "sha256": text["card_digest"],
        "compressTextV1": text["text_digest"],
        "compressTokensV1": text["tokens_digest"],
    }
    found: dict[str, Any] = {
        "name": text["card"],
        "digest": {name: _hex(value) for name, value in digest.items() if value is not None},
        "annotations": {name: text[name] for name in ("stage", "title", "license", "source")},
    }
    if text["dataset"] is not None:
        found["uri"] = f"https://huggingface.co/datasets/{text['dataset']}"
        if text["revision"] is not None:
            found["digest"]["gitCommit"] = text["revision"]
    elif text["card"].startswith("builtin://"):
        found["uri"] = text["card"]
    return found


def _sha256(digest: str) -> dict[str, str]:
    return {"sha256": _hex(digest)}


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _timestamp(local: str) -> str:
    """Return a time of provenance.py in UTC, as RFC 3339 has it."""
    return datetime.strptime(local, "%Y-%m-%dT%H:%M:%S%z").astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
