"""Checkpoint formats that other programs load: one file a format, with its codec, its config and the known
limits of its consumers.

The same file reads the format back, so that other tools' checkpoints and our own artifacts are opened by
one function (`open_checkpoint`). `format_writer.py` writes a model in any of the formats, after `refusals.py`
has checked that the format can hold it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from compress.artifact.manifest import MANIFEST_NAME, open_artifact
from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.arch_params import itemsize_of
from compress.models.canonical import OUTER_NAME, CanonicalStore, stated_kv_format
from compress.models.checkpoint import Checkpoint
from compress.models.weights import WeightSource
from compress.plugins import PluginSet
from compress.quant.codec import ForeignCodec
from compress.quant.kv import (
    FP8_ATTENTION,
    FP8_STATIC,
    FP8_TOKEN_HEAD,
    INT4_TOKEN_HEAD,
    INT8_TOKEN_HEAD,
    transforms_heads,
)
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import Scheme


@dataclass(frozen=True)
class Consumer:
    """A program that may load the result, according to its sources and our tests; `note` gives the condition
    or the reason."""

    name: str
    loads: bool
    note: str


@dataclass(frozen=True)
class Rule:
    """A limit that would make the written checkpoint wrong or unloadable."""

    name: str
    problem: str


@dataclass(frozen=True)
class StaticKV:
    """The parts of `quantization_config` for a KV cache with calibrated scales: one for checkpoints of
    quantized weights, and one (`alone`) for those of dense weights, None where the format has no word for
    them."""

    beside: Mapping[str, Any]
    alone: Mapping[str, Any] | None


class ExportFormat(Protocol):
    """One checkpoint format. `quant_method` is its name in a checkpoint's `quantization_config`;
    `scale_dtype` is None where scales keep their dtype on disk; `static_kv` is None where the format
    cannot express a KV cache with calibrated scales."""

    @property
    def quant_method(self) -> str: ...

    @property
    def scale_dtype(self) -> torch.dtype | None: ...

    @property
    def static_kv(self) -> StaticKV | None: ...

    @property
    def codec(self) -> ForeignCodec: ...

    def quantization_config(
        self, scheme: ModelScheme, *, head: str, linears: Sequence[str] = (), untouched: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return the `quantization_config` of `config.json`. All names are those of the modules in
        `transformers`, also in `scheme`; `linears` are all linears of the layers, which a format needs where
        they have several schemes. `untouched` are modules that are dense with all inside: the parts that are
        none of the language model's, and the experts of a layer, which vLLM looks up as one."""

    def broken_rules(self, arch: Arch, scheme: ModelScheme) -> list[Rule]:
        """Return the reasons not to write this model in this scheme in this format; empty when it may be
        written."""

    def consumers(self, arch: Arch, scheme: ModelScheme) -> list[Consumer]:
        """Return the programs that may load the result."""


@runtime_checkable
class FormatByName(Protocol):
    """A checkpoint format that can state which modules of any model are quantized, by the names of their
    tensors."""

    @property
    def codec(self) -> ForeignCodec: ...

    def refusal_by_name(self, scheme: Scheme) -> str | None:
        """Return why no model can be written in this scheme, None where one can."""

    def reason_dense(self, scheme: Scheme, out_features: int, in_features: int) -> str | None:
        """Return why a linear of this shape has to stay dense, None where it can be quantized."""

    def config_by_name(
        self, scheme: Scheme, *, quantized: Sequence[str], dense: Sequence[str]
    ) -> dict[str, Any]:
        """Return the `quantization_config` of a model whose modules `quantized` have this scheme; `dense` are
        its other matrices."""


@runtime_checkable
class GraphFormat(Protocol):
    """A checkpoint format with a graph of the model's computation over its weights. It writes dense models,
    too; all dense weights are stored in `dtype`."""

    @property
    def dtype(self) -> torch.dtype: ...

    def check(self) -> None:
        """Raise EnvironmentUnfit where a package that writes the graph is not installed."""

    def broken_facts(self, arch: Arch) -> list[Rule]:
        """Return the facts of a model, dense or quantized, that the graph does not express."""

    def write_graph(self, directory: Path, arch: Arch, scheme: ModelScheme | None) -> None:
        """Write the graph of the checkpoint in the directory; `scheme` has canonical names."""


@runtime_checkable
class FormatWithFiles(Protocol):
    """A checkpoint format that writes further files next to `config.json`."""

    def write_files(self, directory: Path, quantization_config: Mapping[str, Any]) -> None:
        """Write them into the directory of a checkpoint with this `quantization_config`."""


@runtime_checkable
class OneScaleFormat(Protocol):
    """A checkpoint format that stores one scale for all weights of a linear in some schemes that may have one
    for each row."""

    def takes_one_scale(self, scheme: Scheme) -> bool:
        """Return whether all weights of a linear of this scheme must have one scale."""


VLLM_KV_FLAGS = {
    FP8_TOKEN_HEAD: "--kv-cache-dtype fp8_per_token_head",
    FP8_ATTENTION: "--kv-cache-dtype fp8_per_token_head",
    INT8_TOKEN_HEAD: "--kv-cache-dtype int8_per_token_head",
    INT4_TOKEN_HEAD: "--kv-cache-dtype int4_per_token_head",
}
"""vLLM's flag for each KV format that no checkpoint format expresses."""
FORMATS: PluginSet[ExportFormat] = PluginSet("export format", "compress.export")
DRAFT_FOLDER = "draft"
"""Folder of a checkpoint that holds its draft."""
PROPOSED = 4
"""Tokens that a draft proposes in a step by default."""


def format_by_name(name: str) -> FormatByName:
    """Return the format of that name that states modules by the names of their tensors.

    Raises:
        UsageError: there is no format of that name, or it cannot.
    """
    form = FORMATS.get(name)
    if not isinstance(form, FormatByName):
        able = [each for each, member in FORMATS.items() if isinstance(member, FormatByName)]
        raise UsageError(f"{name} is not written by tensor name; {' and '.join(able)} are.")
    return form


def dense_itemsize(name: str, arch: Arch) -> int:
    """Return the bytes of a dense weight, and of a scale, of a model in the format of that name."""
    form = FORMATS.get(name)
    return form.dtype.itemsize if isinstance(form, GraphFormat) else itemsize_of(arch)


READ_ONLY: PluginSet[ForeignCodec] = PluginSet("codec", "compress.export", group="compress.export.codecs")
"""The codecs of checkpoints that are read and not written, by `quant_method`."""


def codecs() -> Mapping[str, ForeignCodec]:
    """Return the codec of every format, and of each that is read only, by `quant_method`."""
    return {**{each.quant_method: each.codec for _, each in FORMATS.items()}, **dict(READ_ONLY.items())}


def open_checkpoint(path: Path, *, kv_format: str | None = None) -> Checkpoint:
    """Open a Hugging Face directory, dense or quantized in any supported format; `kv_format` is used where
    its own config states none."""
    return Checkpoint(path, codecs=codecs(), kv_format=kv_format)


def open_weights(path: Path) -> WeightSource:
    """Open the weights at `path`: an artifact of an earlier stage or a Hugging Face directory.

    Raises:
        UsageError: there is no model.
        UnsupportedArch, UnsupportedFormat: a part of it is not supported.
    """
    if not (path / MANIFEST_NAME).exists():
        return open_checkpoint(path)
    artifact = open_artifact(path)
    return (
        CanonicalStore(artifact)
        if (path / OUTER_NAME).exists()
        else open_checkpoint(path, kv_format=stated_kv_format(artifact))
    )


def is_graph(name: str | None) -> bool:
    """Return whether that is the name of a format with a graph."""
    return name in FORMATS.names() and isinstance(FORMATS.get(str(name)), GraphFormat)


def serve_command(
    kv_format: str | None, *, form: str | None = None, method: str | None = None, k: int = PROPOSED
) -> str:
    """Return the command by which vLLM serves a checkpoint of the format `form`, or by which this project
    does where vLLM cannot; with a draft in it, by the method of that name and `k` proposed tokens a step."""
    if is_graph(form):
        return "compress serve <this directory>"
    words = ["vllm serve <this directory>", VLLM_KV_FLAGS.get(kv_format or "", "")]
    if method is not None:
        draft = {} if method == "mtp" else {"model": f"<this directory>/{DRAFT_FOLDER}"}
        config = {**draft, "num_speculative_tokens": k, "method": method}
        words.append(f"--speculative-config '{json.dumps(config)}'")
    return " ".join(word for word in words if word)


def kv_note(arch: Arch, kv_format: str) -> str:
    """Return how consumers serve a checkpoint with a KV cache of that format."""
    if arch.has_latents:
        return (
            f"KV cache {kv_format}: only compress.json states it, and only compress serves it; other "
            "programs cache latents in 16 bits unless told otherwise"
        )
    if kv_format == FP8_STATIC:
        return (
            f"KV cache {FP8_STATIC}: compress and vLLM serve it by the checkpoint's scales, transformers "
            "rounds keys and values alike"
        )
    if transforms_heads(kv_format):
        return (
            f"KV cache {kv_format}: only compress.json states it, and only compress serves it; vLLM and "
            "transformers transform no heads, and keep keys and values in 16 bits unless told otherwise"
        )
    return (
        f"KV cache {kv_format}: only compress.json states it, no checkpoint format can; vLLM serves it with "
        f"{VLLM_KV_FLAGS[kv_format]}"
        + ("; compress multiplies in FP8 in prefill attention, too" if kv_format == FP8_ATTENTION else "")
    )
