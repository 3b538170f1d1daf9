"""Conversion from one checkpoint format to another: the same codes, scales and dense weights, bit for bit,
under other names.

Nothing is quantized or rounded here. A weight that the other format cannot express is refused before
anything is written, and the result appears by one rename of a complete directory.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.artifact.atomic import sync_directory
from compress.artifact.leftovers import neighbour
from compress.artifact.manifest import MANIFEST_NAME, Artifact, open_artifact, verify_artifact
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from compress.context import Progress, SilentProgress
from compress.errors import UnsupportedFormat, UsageError
from compress.export import FORMATS, GraphFormat, open_weights
from compress.export.format_writer import write_format
from compress.export.mtp import exported_mtp
from compress.models.arch import Arch
from compress.models.canonical import CanonicalStore
from compress.models.checkpoint import Checkpoint
from compress.models.overrides import described, linear_names
from compress.models.weights import WeightSource
from compress.quant.model_scheme import ModelScheme, commonest
from compress.quant.scheme import QuantizedWeight
from compress.registry.model_source import ModelSource

CONVERT_VERSION = 3


def convert(source: ModelSource, name: str, directory: Path, *, progress: Progress | None = None) -> Artifact:
    """Write a quantized model, an artifact or another tool's checkpoint, as the new `directory` in the
    format called `name`; a dense one, too, where the format has a graph.

    Raises:
        UsageError: no such format, or the directory exists and is not empty.
        UnsupportedFormat: the model is dense and the format has no graph, or the model is not supported in
            every part, or the format cannot express it exactly.
        StorageError: the artifact does not match its manifest.
    """
    form = FORMATS.get(name)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"{directory} exists and is not an empty directory; name a new one.")
    weights = open_weights(source.path)
    scheme = scheme_of(weights) if isinstance(form, GraphFormat) else stated_scheme(weights)
    artifact = open_artifact(source.path) if (source.path / MANIFEST_NAME).exists() else None
    if artifact is not None:
        verify_artifact(artifact)
    digest = source.digest if artifact is None else artifact.digest
    kv_cache = _cache_facts(weights, artifact)

    def build(out: ArtifactWriter) -> None:
        mtp = None if isinstance(form, GraphFormat) else exported_mtp(weights, weights.arch)
        source.copy_text_files(out.path)
        write_format(name, out.path, Watched(weights, progress or SilentProgress()), scheme, mtp=mtp)
        source.copy_documents(out.path)
        arch, layers = described(weights.arch, scheme)
        out.describe(
            role="checkpoint",
            arch=arch,
            layers=layers,
            scheme=None if scheme is None else scheme.to_json(),
            facts={"format": name, **kv_cache},
        )

    parents = {"source": digest}
    key = Workspace.key("convert", CONVERT_VERSION, {"to": name}, parents, 0)
    with neighbour(directory, "converting") as temporary:
        built = Workspace(temporary).commit(key, "convert", parents, build)
        os.rename(built.path, directory)
    sync_directory(directory.parent)
    return open_artifact(directory)


def _cache_facts(weights: WeightSource, artifact: Artifact | None) -> dict[str, Any]:
    """Return the manifest's facts of a quantized KV cache: those of the artifact with the same cache, or its
    format."""
    if weights.kv_format is None:
        return {}
    stated = {} if artifact is None else artifact.manifest.facts.get("kv_cache", {})
    return {
        "kv_cache": stated if stated.get("format") == weights.kv_format else {"format": weights.kv_format}
    }


def scheme_of(weights: WeightSource) -> ModelScheme | None:
    """Return the scheme of a model; the scheme of most linears is that of the layers, and the others are
    exceptions. None where every linear is dense.
    """
    if isinstance(weights, CanonicalStore) and weights.scheme is not None:
        return weights.scheme
    schemes = dict(weights.schemes) if isinstance(weights, Checkpoint) else {}
    head = schemes.pop("head", None)
    if not schemes and head is None:
        return None
    return commonest({linear: schemes.get(linear) for linear in linear_names(weights.arch)}, head=head)


def stated_scheme(weights: WeightSource) -> ModelScheme | None:
    """Return the scheme of a quantized model, as `scheme_of`. None where only the KV cache is quantized.

    Raises:
        UnsupportedFormat: all of it is dense.
    """
    scheme = scheme_of(weights)
    if scheme is None and weights.kv_format is None:
        raise UnsupportedFormat(
            "the linears of this model's layers are dense: there are no codes to convert. `compress run` "
            "makes some."
        )
    return scheme


@dataclass(frozen=True)
class Watched:
    """A source that reports which layer is being read."""

    source: WeightSource
    progress: Progress

    @property
    def arch(self) -> Arch:
        return self.source.arch

    @property
    def kv_format(self) -> str | None:
        return self.source.kv_format

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self.source.outer()

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        self.progress.update(layer_idx + 1, self.arch.num_layers, f"layer {layer_idx}")
        return self.source.layer(layer_idx)
