"""A model written as a Hugging Face directory in an export format, once nothing refuses it."""

from dataclasses import replace
from pathlib import Path

from compress.export import FORMATS, FormatWithFiles, GraphFormat
from compress.export.in_dtype import InDtype
from compress.export.refusals import check_rules, check_scales
from compress.export.restated import restated_fields
from compress.models.altup import ALTUP_LINEARS, stream_names
from compress.models.arch import Arch
from compress.models.checkpoint_writer import MAX_SHARD_BYTES, write_checkpoint
from compress.models.family import Family, family_of_arch
from compress.models.gated_residual_layer import gated_residual_linears
from compress.models.laurel import LAUREL_LINEARS
from compress.models.layer_embedding import IN_LAYERS, PROJECTION
from compress.models.mtp_tensors import MtpTensors, module_of_matrix
from compress.models.overrides import linear_names
from compress.models.weights import UNTOUCHED, WeightSource, check_untouched
from compress.quant.kv import FP8_STATIC
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import Scheme

GRAPH_SHARD_BYTES = 1_000_000_000
"""Largest shard of a checkpoint with a graph, and so the memory that writing takes; a larger tensor has its
own."""
WHOLE_NAMES = ("fp8",)
"""Formats in whose list of dense modules vLLM (0.32) looks up linears by their whole names, and the experts
of a layer as one. Dense linears inside of a listed module it would read as codes, without an error."""


def write_format(
    name: str,
    directory: Path,
    source: WeightSource,
    scheme: ModelScheme | None,
    *,
    mtp: MtpTensors | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a quantized model as a Hugging Face directory in the format of that name, with its graph if the
    format has one; without a scheme, a dense one with its KV cache. `mtp` are the layers that predict further
    tokens. The config states the dtype in which the model computes, also where the format stores dense
    weights in another.

    Raises:
        UnsupportedFormat: a rule of the format is broken, a scale would change, or parts other than the
            language model are in codes, which no config that is written describes; nothing is written then.
    """
    check_rules(name, source.arch, scheme, source.kv_format)
    check_scales(name, source)
    form = FORMATS.get(name)
    if isinstance(form, GraphFormat):
        source = InDtype(source, form.dtype)
        max_shard_bytes = min(max_shard_bytes, GRAPH_SHARD_BYTES)
    family = family_of_arch(source.arch).in_format(form.quant_method)
    static_kv = form.static_kv if source.kv_format == FP8_STATIC else None
    if scheme is None:
        config = None if static_kv is None else static_kv.alone
    else:

        def config_name(module: str) -> str:
            return family.to_memory(family.to_disk(module))

        def config_names(module: str) -> tuple[str, ...]:
            return family.names_in_memory(family.to_disk(module))

        by_whole_names: list[str] = []
        if form.quant_method in WHOLE_NAMES:
            by_whole_names = [*_untouched_matrices(source, family), *(() if mtp is None else mtp.matrices)]
        linears = [name for linear in linear_names(source.arch) for name in config_names(linear)]
        coded = form.quantization_config(
            with_dense_matrices(scheme, source.arch).renamed(config_names),
            head=config_name("head"),
            linears=list(dict.fromkeys(linears)),
            untouched=[
                *family.untouched_modules,
                *(() if mtp is None else map(family.to_memory, mtp.modules)),
                *dict.fromkeys(map(family.to_memory, by_whole_names)),
                *map(_experts_of, map(config_name, dense_experts(scheme, source.arch))),
            ],
        )
        config = {**coded, **({} if static_kv is None else static_kv.beside)}
    if config is not None:
        without = tuple(f"{UNTOUCHED}{prefix}" for prefix in (() if mtp is None else mtp.prefixes))
        check_untouched({name: each for name, each in source.outer().items() if not name.startswith(without)})
    write_checkpoint(
        directory,
        source,
        codec=form.codec,
        quantization_config=config,
        fields=restated_fields(source.arch),
        more=() if mtp is None else mtp.tensors(),
        without=() if mtp is None else mtp.prefixes,
        max_shard_bytes=max_shard_bytes,
    )
    if isinstance(form, GraphFormat):
        form.write_graph(directory, source.arch, scheme)
    if isinstance(form, FormatWithFiles) and config is not None:
        form.write_files(directory, config)


def _untouched_matrices(source: WeightSource, family: Family) -> list[str]:
    """Return the modules of the matrices of the parts that are none of the language model's."""
    parts = tuple(f"{UNTOUCHED}{part}." for part in family.untouched_parts)
    outer = source.outer() if parts else {}
    matrices = [name for name, each in outer.items() if name.startswith(parts) and len(each.shape) > 1]
    return list(dict.fromkeys(module_of_matrix(name.removeprefix(UNTOUCHED)) for name in matrices))


def with_dense_matrices(scheme: ModelScheme, arch: Arch) -> ModelScheme:
    """Return the schemes with the matrices that no scheme reaches among the dense linears, because consumers
    take them for linears like others: routers, the gates of shared experts, the decay and the beta of delta
    nets, the gates of heads, indexers, those that read embeddings for each layer, and those of AltUp, of
    LAuReL and of gated residuals."""
    others: list[tuple[str, Scheme | None]] = [
        (f"layers.{idx}.{name.removesuffix('.weight')}", None)
        for idx, layer in enumerate(arch.layers)
        for name, shape in layer.dense_shapes(arch.hidden_size).items()
        if name.endswith(".weight") and len(shape) == 2 and not name.startswith("ngrams.table.")
    ]
    if arch.layer_embed_size:
        modules = [f"layers.{idx}.layer_embed.{name}" for idx in range(arch.num_layers) for name in IN_LAYERS]
        others += [(module, None) for module in (*modules, PROJECTION)]
    of_residual = [
        *(ALTUP_LINEARS if arch.altup_streams else ()),
        *(LAUREL_LINEARS if arch.laurel_rank else ()),
    ]
    others += [(f"layers.{idx}.{name}", None) for idx in range(arch.num_layers) for name in of_residual]
    others += [(name, None) for name in (*stream_names(arch), *gated_residual_linears(arch))]
    return replace(scheme, exceptions=(*scheme.exceptions, *others))


def dense_experts(scheme: ModelScheme, arch: Arch) -> list[str]:
    """Return a linear of an expert of each layer whose experts are dense."""
    firsts = [f"layers.{idx}.moe.experts.0.down" for idx, layer in enumerate(arch.layers) if layer.experts]
    return [linear for linear in firsts if scheme.for_linear(linear) is None]


def _experts_of(linear: str) -> str:
    """Return the module of all experts of a layer, given the name of a linear of one, or of all, on disk."""
    block, named, _ = linear.partition(".experts.")
    return f"{block if named else linear.rpartition('.')[0]}.experts"
