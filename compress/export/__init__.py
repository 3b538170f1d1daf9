"""Checkpoint formats that other programs load: one file a format, with its codec, its config and the known
limits of its consumers.

The same file reads the format back, so that other tools' checkpoints and our own artifacts are opened by
one function (`open_checkpoint`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from compress.artifact.manifest import MANIFEST_NAME, open_artifact
from compress.errors import UnsupportedFormat, UsageError
from compress.export.in_dtype import InDtype
from compress.export.restated import restated_fields
from compress.models.arch import Arch
from compress.models.canonical import OUTER_NAME, CanonicalStore, stated_kv_format
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import MAX_SHARD_BYTES, write_checkpoint
from compress.models.family import family_of
from compress.models.overrides import linear_names
from compress.models.weights import WeightSource
from compress.plugins import PluginSet
from compress.quant.codec import ForeignCodec
from compress.quant.kv import (
    FP8_STATIC,
    FP8_TOKEN_HEAD,
    INT4_TOKEN_HEAD,
    INT8_TOKEN_HEAD,
    transforms_heads,
)
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import DENSE, QuantizedWeight, Scheme


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
    INT8_TOKEN_HEAD: "--kv-cache-dtype int8_per_token_head",
    INT4_TOKEN_HEAD: "--kv-cache-dtype int4_per_token_head",
}
"""vLLM's flag for each KV format that no checkpoint format expresses."""
FORMATS: PluginSet[ExportFormat] = PluginSet("export format", "compress.export")
DRAFT_FOLDER = "draft"
"""Folder of a checkpoint that holds its draft."""
GRAPH_SHARD_BYTES = 1_000_000_000
"""Largest shard of a checkpoint with a graph, and so the memory that writing takes; a larger tensor has its
own."""
WIDEST = "compressed-tensors"
"""The format that takes most schemes."""
TAKE_ONE_SCALE = "Quantize with `round: {kind: rtn, scale: matrix}`, or export compressed-tensors."
"""The advice of errors about a format that stores one scale for a linear."""
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


def dense_itemsize(name: str) -> int:
    """Return the bytes of a dense weight, and of a scale, in the format of that name: two where it keeps the
    dtype of the model."""
    form = FORMATS.get(name)
    return form.dtype.itemsize if isinstance(form, GraphFormat) else 2


def codecs() -> Mapping[str, ForeignCodec]:
    """Return the codec of every format by `quant_method`."""
    return {each.quant_method: each.codec for _, each in FORMATS.items()}


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


def check_rules(name: str, arch: Arch, scheme: ModelScheme | None, kv_format: str | None = None) -> None:
    """Refuse a format before anything is written; no scheme means dense weights, with a quantized KV cache
    in most formats.

    Raises:
        UnsupportedFormat: naming every broken rule, and the formats that have none.
        EnvironmentUnfit: a package that the format needs is not installed.
    """
    form = FORMATS.get(name)
    if isinstance(form, GraphFormat):
        form.check()
    broken = _broken_rules(form, name, arch, scheme, kv_format)
    if broken:
        others = _other_formats(name, broken, arch, scheme, kv_format)
        raise UnsupportedFormat(
            f"scheme {DENSE if scheme is None else scheme.name} cannot be exported as {name}: "
            f"{_in_one_line(broken)}{others}"
        )


def _broken_rules(
    form: ExportFormat, name: str, arch: Arch, scheme: ModelScheme | None, kv_format: str | None
) -> list[Rule]:
    """Return the broken rules of a format; where a graph does not express the model, those alone, because no
    other scheme would help."""
    has_graph = isinstance(form, GraphFormat)
    if isinstance(form, GraphFormat) and (facts := form.broken_facts(arch)):
        return facts
    broken = [] if scheme is None else form.broken_rules(arch, scheme)
    if has_graph and kv_format is not None:
        problem = f"the graph keeps keys and values as they are, not in {kv_format}."
        broken.append(Rule("kv-cache", problem))
    if scheme is None and not has_graph and (form.static_kv is None or form.static_kv.alone is None):
        broken.append(Rule("dense-weights", f"{name} has no word for a model whose linears are all dense."))
    if kv_format == FP8_STATIC and form.static_kv is None and not has_graph:
        broken.append(
            Rule(
                "kv-scales", f"{name} has no place for the calibrated scales of {kv_format} keys and values."
            )
        )
    return broken


def _in_one_line(rules: Sequence[Rule]) -> str:
    return " ".join(f"[{rule.name}] {rule.problem}" for rule in rules)


def _other_formats(
    refused: str, broken: Sequence[Rule], arch: Arch, scheme: ModelScheme | None, kv_format: str | None
) -> str:
    """Return the sentence that names the formats that can hold a model which `refused` cannot, whose broken
    rules these are; where there is none, the sentence with those of the widest format, if they are others."""
    rules = {
        name: _broken_rules(form, name, arch, scheme, kv_format)
        for name, form in sorted(FORMATS.items(), key=lambda item: item[0] != WIDEST)
        if name != refused and not _takes_one_scale(form, scheme)
    }
    able = [name for name, its in rules.items() if not its]
    if able:
        return f" {' and '.join(filter(None, (', '.join(able[:-1]), able[-1])))} can hold it."
    remaining = [rule for rule in rules.get(WIDEST, ()) if rule not in broken]
    if not remaining:
        return ""
    return f" No other format can hold it as it is; in {WIDEST} this remains: {_in_one_line(remaining)}"


def _takes_one_scale(form: ExportFormat, scheme: ModelScheme | None) -> bool:
    """Return whether a format has one scale for each linear of some of these schemes, which may have more."""
    return (
        isinstance(form, OneScaleFormat)
        and scheme is not None
        and any(form.takes_one_scale(each) for each in scheme.all)
    )


def check_scales(name: str, source: WeightSource) -> None:
    """Refuse a format whose scales cannot represent the same numbers. Every quantized weight is read if the
    format has a dtype of its own, or one scale for the weights of a linear.

    Raises:
        UnsupportedFormat: with the number of scales that would change.
    """
    form = FORMATS.get(name)
    if isinstance(form, OneScaleFormat):
        _check_one_scale(name, form, source)
    dtype = form.scale_dtype
    if dtype is None or dtype == torch.float32:  # which holds the scales of every dtype of a model
        return
    num_changed = 0
    num_scales = 0
    for weight in _quantized_weights(source):
        num_changed += count_changed(weight.scale_OG, dtype)
        num_scales += weight.scale_OG.numel()
    if num_changed:
        raise UnsupportedFormat(
            f"[exact-scales] {name} keeps scales in {_name(dtype)}, which holds {num_scales - num_changed:,} "
            "of this model's "
            f"{num_scales:,} {source.arch.dtype} scales exactly; {num_changed:,} would change, and weights "
            "with them. "
            "compressed-tensors keeps them as they are."
        )


def _check_one_scale(name: str, form: OneScaleFormat, source: WeightSource) -> None:
    """Raise UnsupportedFormat where linears that take one scale have several."""
    taking = (each for each in _quantized_weights(source) if form.takes_one_scale(each.scheme))
    several = sum(not each.has_one_scale for each in taking)
    if several:
        raise UnsupportedFormat(
            f"[one-scale] {name} stores one scale for all weights of a linear, and {several:,} linears have "
            f"one for each row. {TAKE_ONE_SCALE}"
        )


def count_changed(scale_OG: torch.Tensor, dtype: torch.dtype) -> int:
    """Count the scales that `dtype` does not represent exactly; overflow and underflow count."""
    return int((scale_OG.to(dtype).to(torch.float64) != scale_OG.to(torch.float64)).sum())


def write_format(
    name: str,
    directory: Path,
    source: WeightSource,
    scheme: ModelScheme | None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a quantized model as a Hugging Face directory in the format of that name, with its graph if the
    format has one; without a scheme, a dense one with its KV cache. The config states the dtype in which the
    model computes, also where the format stores dense weights in another.

    Raises:
        UnsupportedFormat: a rule of the format is broken, or a scale would change; nothing is written then.
    """
    check_rules(name, source.arch, scheme, source.kv_format)
    check_scales(name, source)
    form = FORMATS.get(name)
    if isinstance(form, GraphFormat):
        source = InDtype(source, form.dtype)
        max_shard_bytes = min(max_shard_bytes, GRAPH_SHARD_BYTES)
    family = family_of({"model_type": source.arch.family}).in_format(form.quant_method)
    static_kv = form.static_kv if source.kv_format == FP8_STATIC else None
    if scheme is None:
        config = None if static_kv is None else static_kv.alone
    else:

        def config_name(module: str) -> str:
            return family.to_memory(family.to_disk(module))

        coded = form.quantization_config(
            with_dense_routers(scheme, source.arch).renamed(config_name),
            head=config_name("head"),
            linears=list(dict.fromkeys(map(config_name, linear_names(source.arch)))),
            untouched=[
                *family.untouched,
                *map(_experts_of, map(config_name, dense_experts(scheme, source.arch))),
            ],
        )
        config = {**coded, **({} if static_kv is None else static_kv.beside)}
    write_checkpoint(
        directory,
        source,
        codec=form.codec,
        quantization_config=config,
        fields=restated_fields(source.arch),
        max_shard_bytes=max_shard_bytes,
    )
    if isinstance(form, GraphFormat):
        form.write_graph(directory, source.arch, scheme)
    if isinstance(form, FormatWithFiles) and config is not None:
        form.write_files(directory, config)


def with_dense_routers(scheme: ModelScheme, arch: Arch) -> ModelScheme:
    """Return the schemes with the routers, and the gates of shared experts, among the dense linears, because
    consumers take them for linears like others."""
    routers = [
        (f"layers.{idx}.{name.removesuffix('.weight')}", None)
        for idx, layer in enumerate(arch.layers)
        if layer.experts is not None
        for name in layer.experts.dense_shapes(arch.hidden_size)
        if name.endswith(".weight")
    ]
    return replace(scheme, exceptions=(*scheme.exceptions, *routers))


def dense_experts(scheme: ModelScheme, arch: Arch) -> list[str]:
    """Return a linear of an expert of each layer whose experts are dense."""
    firsts = [f"layers.{idx}.moe.experts.0.down" for idx, layer in enumerate(arch.layers) if layer.experts]
    return [linear for linear in firsts if scheme.for_linear(linear) is None]


def _experts_of(linear: str) -> str:
    """Return the module of all experts of a layer, given the name of a linear of one, or of all, on disk."""
    block, named, _ = linear.partition(".experts.")
    return f"{block if named else linear.rpartition('.')[0]}.experts"


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
        config = {"model": f"<this directory>/{DRAFT_FOLDER}", "num_speculative_tokens": k, "method": method}
        words.append(f"--speculative-config '{json.dumps(config)}'")
    return " ".join(word for word in words if word)


def kv_note(kv_format: str) -> str:
    """Return how consumers serve a checkpoint with a KV cache of that format."""
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
    )


def _quantized_weights(source: WeightSource) -> Iterator[QuantizedWeight]:
    yield from (value for value in source.outer().values() if isinstance(value, QuantizedWeight))
    for idx in range(source.arch.num_layers):
        yield from (value for value in source.layer(idx).values() if isinstance(value, QuantizedWeight))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
