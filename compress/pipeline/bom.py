"""The bill of materials of an artifact: CycloneDX 1.6 (https://cyclonedx.org/docs/1.6/json), a
machine-learning model with its files, the model that it was made from, the texts that were read, what was
measured, and the libraries that made it. It has no time and no host, so that one machine writes one.
"""

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from compress.artifact.manifest import Artifact
from compress.digest import canonical_json
from compress.registry.signatures import files_of_artifact

_METRICS = {
    "ppl_ratio": "perplexity over that of the source",
    "kl_mean": "mean KL divergence from the source, in nats a token",
    "top1": "share of tokens with the likeliest token of the source",
}


def bill_of_materials(
    provenance: Mapping[str, Any], artifact: Artifact, report: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the document; `provenance` is what provenance.py wrote, `report` the report of validation."""
    source = _source(provenance["source"])
    texts = _texts(provenance["texts"])
    model = _model(artifact, report, [each["bom-ref"] for each in texts])
    body = {
        "metadata": {
            "component": model,
            "tools": {"components": list(_tools(provenance))},
        },
        "components": [source, *texts],
        "dependencies": [
            {
                "ref": model["bom-ref"],
                "dependsOn": [source["bom-ref"], *(each["bom-ref"] for each in texts)],
            }
        ],
    }
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, canonical_json(body).decode()).urn,
        "version": 1,
        **body,
    }


def _model(artifact: Artifact, report: Mapping[str, Any], datasets: list[str]) -> dict[str, Any]:
    manifest = artifact.manifest
    family = (manifest.arch or {}).get("family")
    return {
        "type": "machine-learning-model",
        "bom-ref": artifact.digest,
        "name": str(report.get("title", "model")),
        "version": artifact.digest,
        "hashes": _hashes(artifact.digest),
        "modelCard": {
            "modelParameters": {
                "task": "text-generation",
                "architectureFamily": "transformer",
                **({} if family is None else {"modelArchitecture": str(family)}),
                "datasets": [{"ref": ref} for ref in datasets],
            },
            "quantitativeAnalysis": {"performanceMetrics": list(_metrics(report))},
            "considerations": {"technicalLimitations": [str(each) for each in report.get("warnings", ())]},
        },
        "components": [
            {
                "type": "file",
                "bom-ref": f"file:{name}",
                "name": name,
                "hashes": _hashes(digest),
            }
            for name, digest in sorted(files_of_artifact(artifact).items())
        ],
        "properties": _properties(
            {
                "scheme": (manifest.scheme or {}).get("name"),
                "format": manifest.facts.get("format"),
            }
        ),
    }


def _metrics(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    accuracy = report.get("accuracy") or {}
    evaluated = (report.get("calibration") or {}).get("evaluation_data")
    for name, words in _METRICS.items():
        interval = accuracy.get(name)
        if not isinstance(interval, dict):
            continue
        yield {
            "type": f"{name}: {words}",
            "value": f"{interval['value']:.6g}",
            **({} if evaluated is None else {"slice": str(evaluated)}),
            "confidenceInterval": {
                "lowerBound": f"{interval['lower']:.6g}",
                "upperBound": f"{interval['upper']:.6g}",
            },
        }


def _source(source: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "machine-learning-model",
        "bom-ref": f"source:{source['digest']}",
        "name": source["name"],
        "properties": _properties({"uri": source["uri"], "model-digest": source["digest"]}),
    }
    if source["revision"] is not None:
        found["version"] = source["revision"]
    if (source["uri"] or "").startswith("hf://"):
        found["purl"] = f"pkg:huggingface/{source['name']}@{source['revision']}"
    return found


def _texts(texts: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a component for each text; the stages that read one text share it."""
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        ref = f"text:{text['text_digest'] or text['tokens_digest'] or text['card']}"
        if ref in found:
            found[ref]["properties"] += _properties({"stage": text["stage"]})
            continue
        facts = {
            "stage": text["stage"],
            "card": text["card"],
            "card-digest": text["card_digest"],
            "text-digest": text["text_digest"],
            "tokens-digest": text["tokens_digest"],
        }
        found[ref] = {
            "type": "data",
            "bom-ref": ref,
            "name": text["title"],
            "description": text["source"],
            "licenses": [{"license": {"name": text["license"]}}],
            "data": [{"type": "dataset", "name": text["dataset"] or text["title"]}],
            "properties": _properties(facts),
        }
        if text["revision"] is not None:
            found[ref]["version"] = text["revision"]
    return list(found.values())


def _tools(provenance: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"type": "application", "name": "compress", "version": provenance["tool"]["compress"]}
    for name, version in provenance["libraries"].items():
        if version is not None:
            yield {"type": "library", "name": name, "version": version, "purl": _pypi(name, version)}


def _pypi(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version.replace('+', '%2B')}"


def _hashes(digest: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": digest.removeprefix("sha256:")}]


def _properties(facts: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {"name": f"compress:{name}", "value": str(value)}
        for name, value in facts.items()
        if value is not None
    ]
