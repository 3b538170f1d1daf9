"""Surgery on the decoder: structure is removed, and a smaller model is left.

Removable are KV groups with their query heads, the same number of query heads of every group, FFN
channels, and whole layers. All of these are slices: rows of the linears that write a unit's numbers,
columns of the linear that reads them (`attn.o`, `ffn.down`). A method may replace the columns that stay;
this file only decides which ones do. Widths stay the same in every layer, so that a stock Hugging Face
config can express them.

Shapes: O out, I in, U units, W columns of a unit, H heads, K kv heads, R query heads per kv head, C head
dimension.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.arch_params import is_compressed
from compress.models.canonical import OUTER_NAME, layer_name, load_weights
from compress.models.config_facts import facts_of
from compress.models.family import family_of_arch
from compress.models.layer_shape import LayerShape
from compress.models.layer_types import (
    FIELDS_BY_LAYER,
    INDICES_OF_LAYERS,
    PERIODS_OF_LAYERS,
    TYPES_BY_LAYER,
    after_last,
)
from compress.models.lightning import Lightning
from compress.models.weights import WeightSource
from compress.quant.scheme import QuantizedWeight

HeadUnit = Literal["kv_group", "query_head"]
OF_HEADS = ("attn.sinks", "attn.head_gate.weight", "attn.growth_scale", "attn.growth_base")
"""The parameters that have a number, or a row, for each query head."""


@dataclass(frozen=True)
class Units:
    """Columns of a linear that are kept or removed as one: unit u is columns `u * width .. (u + 1) * width -
    1`. The units form `num_parts` equal parts, one after another, and every part keeps the same number."""

    num_units: int
    width: int = 1
    num_parts: int = 1

    @property
    def of_part(self) -> int:
        """Units of one part."""
        return self.num_units // self.num_parts

    def best(self, score_U: Tensor, num_kept: int) -> Tensor:
        """bool [U]: of each part the share of `num_kept` with the largest scores; of equal ones the first."""
        order = torch.argsort(score_U.view(self.num_parts, -1), dim=1, descending=True, stable=True)
        kept = torch.zeros(self.num_parts, self.of_part, dtype=torch.bool, device=score_U.device)
        return kept.scatter_(1, order[:, : num_kept // self.num_parts], True).view(-1)

    def columns(self, kept_U: Tensor) -> Tensor:
        """bool [I] of bool [U]."""
        return kept_U.repeat_interleave(self.width)


def head_units(shape: LayerShape, unit: HeadUnit) -> Units:
    """Return the units of `attn.o`."""
    repeat = shape.num_heads // shape.num_kv_heads
    if unit == "kv_group":
        return Units(shape.num_kv_heads, repeat * shape.value_dim)
    return Units(shape.num_heads, shape.value_dim, num_parts=shape.num_kv_heads)


def keep_heads_(
    weights: dict[str, Tensor],
    shape: LayerShape,
    unit: HeadUnit,
    kept_U: Tensor,
    o_weight: Tensor | None = None,
) -> None:
    """Slice q, k, v and o of a layer with what else belongs to heads, or the linears of its latents and o, in
    place; `o_weight` replaces the kept columns of o, by default they stay."""
    units = head_units(shape, unit)
    columns = units.columns(kept_U)
    kept_H = columns[:: shape.value_dim]
    of_queries = ("attn.q", "attn.q_up")
    rows: dict[str, Tensor] = dict.fromkeys(of_queries, kept_H.repeat_interleave(shape.head_dim))
    rows["attn.gate"] = kept_H.repeat_interleave(shape.value_dim)
    if shape.relative is not None:
        rows["attn.relative"] = kept_H.repeat_interleave(shape.relative.rank)
    if unit == "kv_group":
        rows["attn.k"] = kept_U.repeat_interleave(shape.head_dim)
        rows["attn.v"] = kept_U.repeat_interleave(shape.value_dim)
        rows |= {"attn.k_conv": rows["attn.k"], "attn.v_conv": rows["attn.v"]}
        if shape.block_indexer is not None and not shape.block_indexer.pooled:
            rows["attn.indexer.q"] = kept_U.repeat_interleave(shape.block_indexer.head_dim)
    if shape.latent is not None:
        if shape.latent.gated:
            rows["attn.q_up"] = kept_H.repeat_interleave(shape.head_dim + shape.value_dim)
        of_head = shape.head_dim - shape.latent.rope_dim + shape.value_dim
        rows["attn.kv_up"] = kept_H.repeat_interleave(of_head)
    for linear, kept in rows.items():
        _keep_rows_(weights, linear, kept)
    for name in OF_HEADS:
        if name in weights:
            weights[name] = weights[name][kept_H]
    weights["attn.o.weight"] = weights["attn.o.weight"][:, columns] if o_weight is None else o_weight


def keep_channels_(weights: dict[str, Tensor], kept_U: Tensor, down_weight: Tensor | None = None) -> None:
    """Slice gate, up and down of a layer, in place, as `keep_heads_`."""
    for linear in ("ffn.gate", "ffn.up"):
        _keep_rows_(weights, linear, kept_U)
    weights["ffn.down.weight"] = weights["ffn.down.weight"][:, kept_U] if down_weight is None else down_weight


def _keep_rows_(weights: dict[str, Tensor], linear: str, rows: Tensor) -> None:
    for name in (f"{linear}.weight", f"{linear}.bias"):
        if name in weights:
            weights[name] = weights[name][rows]


@dataclass(frozen=True)
class Widths:
    """The widths of a model that pruning decides."""

    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    num_layers: int

    @staticmethod
    def of(arch: Arch) -> "Widths":
        """Return the widths of the first layer, which are those of all where a width may change."""
        first = arch.layers[0]
        return Widths(first.num_heads, first.num_kv_heads, first.intermediate_size, arch.num_layers)


def resized(arch: Arch, widths: Widths) -> Arch:
    """Return the same layers with other widths. What is as in `Widths.of` stays in every layer, also where
    layers differ in it."""
    assert widths.num_layers == arch.num_layers, "layers go by `with_layers`, which says which"
    old = Widths.of(arch)
    of_layer = {
        name: getattr(widths, name)
        for name in ("num_heads", "num_kv_heads", "intermediate_size")
        if getattr(widths, name) != getattr(old, name)
    }
    of_experts = {name: size for name, size in of_layer.items() if name != "intermediate_size"}
    layers = (replace(each, **(of_layer if each.experts is None else of_experts)) for each in arch.layers)
    return arch.replace(layers=tuple(map(_with_heads_of_indexers, layers)))


def _with_heads_of_indexers(layer: LayerShape) -> LayerShape:
    """Return a layer whose indexer of blocks has a head for each KV head, unless it has one for all."""
    if layer.block_indexer is None or layer.block_indexer.pooled:
        return layer
    return replace(layer, block_indexer=replace(layer.block_indexer, num_heads=layer.num_kv_heads))


def with_layers(arch: Arch, kept: Sequence[int]) -> Arch:
    """Return the model with only the layers `kept`. Config fields that are stated by layer are cut
    accordingly: where a rule counts layers, each layer's type is spelled out."""
    if list(kept) == list(range(arch.num_layers)):
        return arch
    assert why_layers_stay(arch) is None
    layers = tuple(arch.layers[idx] for idx in kept)
    family = family_of_arch(arch)
    as_stated = family.stated(arch.config)
    stated = family.completed(arch.config)
    found = {name: as_stated.get(name) or stated.get(name) for name in FIELDS_BY_LAYER}
    by_layer: dict[str, list[Any] | str] = {
        name: [each[idx] for idx in kept] for name, each in found.items() if isinstance(each, list)
    }
    by_layer |= {
        name: "".join(each[idx] for idx in kept) for name, each in found.items() if isinstance(each, str)
    }
    indices = {
        name: [new for new, idx in enumerate(kept) if idx in stated[name]]
        for name in INDICES_OF_LAYERS
        if isinstance(stated.get(name), list)
    }
    by_period = any(stated.get(name) is not None for name in PERIODS_OF_LAYERS)
    states_types = not (indices or by_period or family.attention_free)  # others state the types, or none
    if not states_types and not as_stated.get("layer_types"):
        by_layer.pop("layer_types", None)
    by_layer |= indices
    states_windows = bool(indices or by_layer.keys() & {*TYPES_BY_LAYER})
    if not states_windows and len({each.window for each in arch.layers}) > 1:
        by_layer["layer_types"] = [
            "full_attention" if each.window is None else "sliding_attention" for each in layers
        ]
    num_layers = as_stated.get("num_hidden_layers")
    tails = {name: after_last(as_stated.get(name), num_layers, each) for name, each in by_layer.items()}
    if family.mtp is not None and any(tails.values()):
        by_layer = {name: each + tails[name] for name, each in by_layer.items()}
        config = family.changed(arch.config, num_hidden_layers=len(kept), **by_layer)
        return arch.replace(layers=layers, config=config)
    return arch.replace(layers=layers, config=family.changed(arch.config, **by_layer))


def can_have_bias(arch: Arch, linear: str) -> bool:
    """Return whether the family's config has a field for a bias of that linear."""
    family = family_of_arch(arch)
    rule = family.o_bias if linear == "attn.o" else family.ffn_bias
    return arch.has_bias(linear) or isinstance(rule, str)


def with_biases(arch: Arch, linears: Iterable[str]) -> Arch:
    """Return the model with biases in `linears`, and in those that the family's config covers by the same
    field."""
    family = family_of_arch(arch)
    rules = {"qkv_bias": family.qkv_bias, "o_bias": family.o_bias, "ffn_bias": family.ffn_bias}
    for linear in linears:
        rule = rules["o_bias" if linear == "attn.o" else "ffn_bias"]
        if not arch.has_bias(linear):
            assert isinstance(rule, str), f"{arch.family} models have no bias in {linear}"
            arch = arch.replace(
                **{field: True for field, each in rules.items() if each == rule},
                config=family.changed(arch.config, **{rule: True}),
            )
    return arch


def add_biases_(weights: dict[str, Tensor], arch: Arch, shape: LayerShape) -> None:
    """Add zeros for every bias that the model has and the layer's weights lack."""
    for linear in shape.linears:
        weight = weights[f"{linear}.weight"]
        if arch.has_bias(linear, shape) and f"{linear}.bias" not in weights:
            weights[f"{linear}.bias"] = torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device)


def fits_consumers(arch: Arch, num_heads: int) -> bool:
    """Return whether `transformers` takes a config of the family with so many query heads: a Llama's have to
    divide its hidden size, even where the config states their dimension."""
    return not family_of_arch(arch).heads_divide_hidden or arch.hidden_size % num_heads == 0


def why_layers_stay(arch: Arch) -> str | None:
    """Return the reason why no layer of a model can be removed, None where some can."""
    if arch.kv_sources:
        return f"layers of this {arch.family} model read keys and values, or latents, of earlier ones."
    if family_of_arch(arch).passed_layers:
        return f"layers of this {arch.family} model that attend to images lie between the others."
    if family_of_arch(arch).layers_are_numbered:
        return f"other parts of this {arch.family} model write to some of its layers or read them, by number."
    if arch.layer_embed_size:
        return f"tokens of this {arch.family} model have embeddings for each of its layers."
    if any(layer.experts is not None and layer.experts.delayed for layer in arch.layers):
        return f"what experts of this {arch.family} model compute is added after the next layer."
    if any(layer.bare_input or layer.o_bias for layer in arch.layers):
        return f"one layer of this {arch.family} model has a norm less, or a bias more, by its place."
    if arch.has_recurrence(Lightning.module):
        return f"decays of lightning attention of this {arch.family} model follow from the places of layers."
    if arch.has_ngrams:
        return f"tables of n-grams of this {arch.family} model differ by the number of tables before them."
    whole = [each for each in arch.layers if each.latent is not None and each.window is None]
    if arch.has_latents and len({each.indexer is None for each in whole}) > 1:
        return f"layers of this {arch.family} model attend to the keys that the indexers of others choose."
    return None


def why_channels_stay(arch: Arch) -> str | None:
    """Return the reason why no channel of an FFN can be removed, None where some can."""
    if not any(layer.has_ffn for layer in arch.layers):
        return f"no layer of this {arch.family} model has an FFN."
    if any(layer.gate_sparsity is not None for layer in arch.layers):
        return f"gates of this {arch.family} model are sparse by the mean and the deviation of all channels."
    if any(layer.sub_norms for layer in arch.layers):
        return f"a norm of this {arch.family} model spans all channels of an FFN, so each depends on all."
    if family_of_arch(arch).ffn_spans_hidden:
        return (
            f"the class of this {arch.family} model in transformers takes a multiple of hidden_size for the "
            "width of its FFNs, so that cannot change alone."
        )
    return _why_linears_stay(arch)


def _why_linears_stay(arch: Arch) -> str | None:
    """Return the reason why the linears of a model keep their widths, None where they may change."""
    if family_of_arch(arch).has_adapters:
        return f"linears of this {arch.family} model have adapters for images and sound, which stay as wide."
    if family_of_arch(arch).passed_layers:
        return (
            f"layers of this {arch.family} model that attend to images are as wide as the others, and stay."
        )
    return None


def why_heads_stay(arch: Arch) -> str | None:
    """Return the reason why no head of a model can be removed, None where some can."""
    if any(layer.recurrence is not None and not layer.joint for layer in arch.layers):
        return f"most layers of this {arch.family} model have recurrences, whose heads are not removed."
    if is_compressed(arch):
        return (
            f"heads of this {arch.family} model have linears of their outputs in groups, which stay as wide."
        )
    if arch.kv_sources and not arch.has_latents:
        return f"layers of this {arch.family} model share keys and values, so their heads go together."
    if any(layer.alibi is not None for layer in arch.layers):
        return (
            f"slopes of ALiBi of this {arch.family} model follow from the number of its heads, so those that "
            "are left would get others."
        )
    if arch.own_qk_norm:
        return f"each head of q and k of this {arch.family} model has a norm of its own."
    if arch.whole_qk_norm:
        return (
            f"the norms of q and k of this {arch.family} model span all heads, so each head depends on all."
        )
    if any(layer.sub_norms for layer in arch.layers):
        return f"a norm of this {arch.family} model spans what all heads return, so each depends on all."
    if (reason := _why_linears_stay(arch)) is not None:
        return reason
    if family_of_arch(arch).heads_span_hidden:
        return (
            f"the class of this {arch.family} model in transformers takes hidden_size / number of heads for "
            "their size, so their number cannot change alone."
        )
    return None


def is_mistral(arch: Arch) -> bool:
    """Return whether the model is a Llama without biases, which computes what a Mistral computes."""
    return arch.family == "llama" and not (arch.qkv_bias or arch.o_bias or arch.ffn_bias)


def as_mistral(arch: Arch) -> Arch:
    """Return a Llama without biases as a Mistral, which computes the same and whose config takes any number
    of heads.

    Raises:
        UsageError: it is no such Llama.
    """
    if not is_mistral(arch):
        raise UsageError(
            f"as_mistral: a Llama without biases is a Mistral without a window; this {arch.family} model is "
            "none."
        )
    of_llama = facts_of("llama").defaults.keys() - facts_of("mistral").defaults.keys()
    config = {key: value for key, value in arch.config.items() if key not in of_llama}
    return arch.replace(family="mistral", config={**config, "model_type": "mistral", "sliding_window": None})


class Recast:
    """A source with the same weights and other facts."""

    def __init__(self, source: WeightSource, arch: Arch) -> None:
        self._source = source
        self.arch = arch
        self.kv_format = source.kv_format

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self._source.outer()

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        return self._source.layer(layer_idx)


class LayerSubset:
    """A model without some of its layers."""

    def __init__(self, source: WeightSource, kept: Sequence[int]) -> None:
        self._source = source
        self._kept = tuple(kept)
        self.arch = with_layers(source.arch, kept)
        self.kv_format = source.kv_format

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self._source.outer()

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        return self._source.layer(self._kept[layer_idx])


class StoredLayers:
    """Dense weights in the files of the project's own store (`canonical.py`), before an artifact's manifest
    covers them."""

    kv_format: str | None = None

    def __init__(self, directory: Path, arch: Arch) -> None:
        self._directory = directory
        self.arch = arch

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return load_weights(self._directory / OUTER_NAME, None)

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        return load_weights(self._directory / layer_name(layer_idx), None)
