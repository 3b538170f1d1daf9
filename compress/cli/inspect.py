"""`compress inspect`: what an artifact is, from its manifest alone; no weights are read or copied."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.output import JsonFlag, count_text, emit, size_text, table
from compress.digest import digest_bytes
from compress.errors import StorageError, UsageError

if TYPE_CHECKING:
    from compress.artifact.manifest import Manifest


ByDtype = dict[str, dict[str, int]]
"""dtype -> numbers of tensors and elements, and bytes."""


def inspect(
    target: Annotated[str, typer.Argument(help="Directory of an artifact, or a registry reference.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show what an artifact is: role, scheme, layer shapes, tensors by dtype, files, parents."""
    from compress.artifact.manifest import open_artifact

    manifest = (
        _manifest_of_ref(target)
        if "://" in target or target.startswith("models:/")
        else open_artifact(Path(target)).manifest
    )
    emit(describe(manifest, target), as_text(manifest, target, list_tensors=tensors), as_json=as_json)


def describe(manifest: "Manifest", target: str) -> dict[str, Any]:
    """Return the manifest itself, and sums over its files and tensors: `by_dtype` of the artifact's own
    tensors, `folders` of those of the checkpoints in its folders."""
    size_bytes = sum(record.size_bytes for record in manifest.files)
    own, folders = _by_dtype(manifest)
    return {
        "target": target,
        "digest": manifest.digest,
        "size_bytes": size_bytes,
        "by_dtype": own,
        **({"folders": folders} if folders else {}),
        "manifest": asdict(manifest),
    }


def as_text(manifest: "Manifest", target: str, *, list_tensors: bool) -> str:
    """Return the description of an artifact as text."""
    size_bytes = sum(record.size_bytes for record in manifest.files)
    origin = manifest.provenance
    head = [
        ("target", target),
        ("digest", manifest.digest),
        ("role", manifest.role),
        ("stage", origin.get("stage", "-")),
        ("size", f"{size_text(size_bytes)} in {count_text(len(manifest.files), 'file')}"),
        *(("parent", f"{name} {digest}") for name, digest in sorted(origin.get("parents", {}).items())),
    ]
    sections = [
        table(head),
        _facts(
            "architecture", {name: value for name, value in (manifest.arch or {}).items() if name != "config"}
        ),
        _facts("scheme", _scheme_facts(manifest.scheme)),
        _facts(
            "facts", _without_rows({name: value for name, value in manifest.facts.items() if name != "mixed"})
        ),  # long: see --json
        _facts(
            "mixed",
            {name: value for name, value in manifest.facts.get("mixed", {}).items() if name in _MIXED_SHOWN},
        ),
    ]
    if manifest.layers:
        sections.append("layers\n" + _indented(table(_layer_rows(manifest.layers))))
    own, folders = _by_dtype(manifest)
    if own:
        sections.append(_sums("tensors", own))
    sections += [_sums(f"tensors in {folder}", sums) for folder, sums in folders.items()]
    if list_tensors:
        rows_all = [
            (record.name, record.dtype, "x".join(map(str, record.shape)) or "scalar", record.file)
            for record in manifest.tensors
        ]
        sections.append(_indented(table(rows_all)))
    if manifest.files:
        sections.append(
            "files\n"
            + _indented(
                table([(record.path, size_text(record.size_bytes)) for record in manifest.files], right=(1,))
            )
        )
    return "\n\n".join(section for section in sections if section)


def _without_rows(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts without the rows of layers, rounds and candidates, which `--json` has."""
    rows = ("layers", "rounds", "frontier", "measured")
    kept = {name: value for name, value in facts.items() if name not in rows or not isinstance(value, list)}
    return {
        name: _without_rows(value) if isinstance(value, Mapping) else value for name, value in kept.items()
    }


def _sums(title: str, by_dtype: ByDtype) -> str:
    rows = [("dtype", "tensors", "elements", "size")]
    rows += [
        (dtype, str(row["tensors"]), f"{row['elements']:,}", size_text(row["size_bytes"]))
        for dtype, row in by_dtype.items()
    ]
    return f"{title}\n" + _indented(table(rows, right=(1, 2, 3)))


def _by_dtype(manifest: "Manifest") -> tuple[ByDtype, dict[str, ByDtype]]:
    """Return sums over the artifact's own tensors, and over those of each folder of it: a further format, or
    a draft."""
    from compress.artifact.header import BITS_OF_DTYPE

    folders: dict[str, ByDtype] = {}
    for record in manifest.tensors:
        sums = folders.setdefault(record.file.rpartition("/")[0], {})
        row = sums.setdefault(record.dtype, {"tensors": 0, "elements": 0, "size_bytes": 0})
        elements = math.prod(record.shape)
        row["tensors"] += 1
        row["elements"] += elements
        row["size_bytes"] += elements * BITS_OF_DTYPE[record.dtype] // 8
    ordered = {folder: dict(sorted(sums.items())) for folder, sums in sorted(folders.items())}
    return ordered.pop("", {}), ordered


def _layer_rows(layers: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return one row for each run of layers of equal facts."""
    rows = []
    for facts, run in groupby(enumerate(layers), key=lambda item: _fact_line(item[1])):
        indices = [index for index, _ in run]
        rows.append((str(indices[0]) if len(indices) == 1 else f"{indices[0]}-{indices[-1]}", facts))
    return rows


_MIXED_SHOWN = ("budget", "limit", "chosen", "uniform")


def _scheme_facts(scheme: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the scheme with its exceptions counted by scheme; the layers list which linears they are."""
    if not scheme or "exceptions" not in scheme:
        return scheme
    counts = [
        f"{len(each['linears'])} linears {each['scheme']['name'] if each.get('scheme') else 'dense'}"
        for each in scheme["exceptions"]
    ]
    return {**scheme, "exceptions": ", ".join(counts)}


def _fact_line(facts: Mapping[str, Any]) -> str:
    """Return the facts of a layer on one line, a rope by its kind and base; `--json` has the rest."""
    shown = {
        key: f"{value['kind']}@{value['theta']:g}" if key == "rope" and value else _value_text(value)
        for key, value in facts.items()
    }
    return "  ".join(f"{key}={value}" for key, value in shown.items())


def _facts(title: str, facts: Mapping[str, Any] | None) -> str:
    return (
        f"{title}\n" + _indented(table([(key, _value_text(value)) for key, value in facts.items()]))
        if facts
        else ""
    )


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _indented(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())


def _manifest_of_ref(text: str) -> "Manifest":
    """Return the artifact's manifest from a registry: two small blobs are read, both checked against their
    digests.
    """
    from compress.artifact.manifest import MAX_MANIFEST_BYTES, Manifest
    from compress.registry.image import ARTIFACT, Descriptor, ImageManifest
    from compress.registry.stored import open_repository, resolve

    ref = resolve(text)
    registry = open_repository(ref)
    descriptor = registry.find(str(ref.digest))
    if descriptor is None:
        raise StorageError(f"{ref} has gone from {ref.registry} since it was looked up; try again.")

    def read(blob: Descriptor) -> bytes:
        with registry.get(blob) as stream:
            data = stream.read(min(blob.size_bytes, MAX_MANIFEST_BYTES) + 1)
        if digest_bytes(data) != blob.digest:
            raise StorageError(
                f"the {blob} in {ref.registry} is damaged; push the artifact again to repair it."
            )
        return data

    image = ImageManifest.from_bytes(read(descriptor), str(ref))
    if image.artifact_type != ARTIFACT:
        raise UsageError(f"{ref} is not an artifact of compress but of type {image.artifact_type}.")
    return Manifest.from_bytes(read(image.config), where=str(ref))
