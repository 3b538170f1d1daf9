"""The shape of a layer as the manifest of an artifact states it."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from compress.errors import StorageError
from compress.models.alibi import Alibi
from compress.models.compressed import Compressed
from compress.models.experts import Experts
from compress.models.indexer import BlockIndexer
from compress.models.latent import Latent
from compress.models.layer_shape import HALVES, HEAD_GATES, LayerShape, Rope
from compress.models.limits import (
    CAPS,
    FACTORS,
    FREQUENCY_EXPONENTS,
    FREQUENCY_FACTORS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_SIZE,
    ROPE_KINDS,
    SPARSITIES,
    THETAS,
)
from compress.models.ngrams import NGrams
from compress.models.recurrence import MAX_KERNEL
from compress.models.recurrences import RECURRENCES
from compress.models.relative_logits import RelativeLogits
from compress.untrusted.fields import Fields

_Text = TypeVar("_Text", bound=str)
_RARE_FACTS = (
    "experts",
    "keys_are_values",
    "chunk",
    "latent",
    "output_gate",
    "head_gate",
    "recurrence",
    "only_half",
    "joint",
    "narrow_value_dim",
    "block_indexer",
    "ffn_cap",
    "expert_cap",
    "gate_sparsity",
    "norm_gate_rank",
    "relative",
    "residual_convs",
    "scaled_ffn",
    "ngrams",
    "compressed",
    "out_norm",
    "caps_first",
    "sub_norms",
    "alibi",
    "o_bias",
    "bare_input",
)
_RARE_ROPE_FIELDS = ("rotary_dim", "leading", "short_factors", "long_factors", "exponents")


def layer_to_json(shape: LayerShape) -> dict[str, Any]:
    """Return the facts of a layer; those of few models are left out where a layer does not have them."""
    layer = dataclasses.asdict(shape)
    if shape.experts is not None:
        layer["experts"] = shape.experts.to_json()
    if shape.latent is not None:
        layer["latent"] = shape.latent.to_json()
    if shape.block_indexer is not None:
        layer["block_indexer"] = shape.block_indexer.to_json()
    if shape.compressed is not None:
        layer["compressed"] = shape.compressed.to_json()
    for name in _RARE_FACTS:
        if not getattr(shape, name):
            del layer[name]
    if shape.relative is not None:
        layer["relative"] = shape.relative.to_json()
    if shape.alibi is not None:
        layer["alibi"] = shape.alibi.to_json()
    if shape.recurrence is not None:
        widths = layer.pop("recurrence")
        plain = {each.name: each.default for each in dataclasses.fields(shape.recurrence)}
        layer[shape.recurrence.module] = {
            name: value for name, value in widths.items() if value != plain[name]
        }
    if shape.kv_source is None:
        del layer["kv_source"]
    if shape.gated:
        del layer["gated"]
    if layer["rope"] is not None:
        for name in _RARE_ROPE_FIELDS:
            if not layer["rope"][name]:
                del layer["rope"][name]
    return layer


def layer_from_json(stored: Mapping[str, Any], idx: int) -> LayerShape:
    """Read what `layer_to_json` wrote.

    Raises:
        StorageError: a value is missing, unknown, of another type or out of range.
    """
    layer = Fields(stored, f"layer {idx} of a manifest", StorageError)
    half = _one_of(HALVES, layer, "only_half")
    return LayerShape(
        num_heads=layer.integer("num_heads", 1, MAX_SIZE),
        num_kv_heads=layer.integer("num_kv_heads", 1, MAX_SIZE),
        head_dim=layer.integer("head_dim", 1, MAX_SIZE),
        intermediate_size=layer.integer("intermediate_size", 1, MAX_SIZE),
        rope=_rope_of(layer) if layer.has("rope") else None,
        window=layer.integer("window", 1, MAX_POSITIONS) if layer.has("window") else None,
        experts=Experts.from_json(layer.fields("experts")) if layer.has("experts") else None,
        keys_are_values=layer.flag("keys_are_values", default=False),
        chunk=layer.integer("chunk", 1, MAX_POSITIONS) if layer.has("chunk") else None,
        latent=Latent.from_json(layer.fields("latent")) if layer.has("latent") else None,
        output_gate=layer.flag("output_gate", default=False),
        head_gate=_one_of(HEAD_GATES, layer, "head_gate"),
        recurrence=next(
            (kind.from_json(layer.fields(kind.module)) for kind in RECURRENCES if layer.has(kind.module)),
            None,
        ),
        kv_source=layer.integer("kv_source", 0, MAX_LAYERS) if layer.has("kv_source") else None,
        only_half=half,
        gated=layer.flag("gated", default=True),
        joint=layer.flag("joint", default=False),
        narrow_value_dim=(
            layer.integer("narrow_value_dim", 1, MAX_SIZE) if layer.has("narrow_value_dim") else None
        ),
        block_indexer=(
            BlockIndexer.from_json(layer.fields("block_indexer")) if layer.has("block_indexer") else None
        ),
        ffn_cap=layer.number("ffn_cap", *CAPS) if layer.has("ffn_cap") else None,
        expert_cap=layer.number("expert_cap", *CAPS) if layer.has("expert_cap") else None,
        gate_sparsity=layer.number("gate_sparsity", *SPARSITIES) if layer.has("gate_sparsity") else None,
        norm_gate_rank=layer.integer("norm_gate_rank", 0, MAX_SIZE, default=0),
        relative=RelativeLogits.from_json(layer.fields("relative")) if layer.has("relative") else None,
        residual_convs=layer.integer("residual_convs", 1, MAX_KERNEL)
        if layer.has("residual_convs")
        else None,
        scaled_ffn=layer.flag("scaled_ffn", default=False),
        ngrams=NGrams.from_json(layer.fields("ngrams")) if layer.has("ngrams") else None,
        compressed=Compressed.from_json(layer.fields("compressed")) if layer.has("compressed") else None,
        out_norm=layer.flag("out_norm", default=False),
        caps_first=layer.flag("caps_first", default=False),
        sub_norms=layer.flag("sub_norms", default=False),
        alibi=Alibi.from_json(layer.fields("alibi")) if layer.has("alibi") else None,
        o_bias=layer.flag("o_bias", default=False),
        bare_input=layer.flag("bare_input", default=False),
    )


def _one_of(known: tuple[_Text, ...], layer: Fields, name: str) -> _Text | None:
    """Return the value of a field, one of those known, or None where it is left out."""
    if not layer.has(name):
        return None
    found = next((each for each in known if each == layer.text(name)), None)
    if found is None:
        raise layer.wrong(name, layer.text(name), f"one of {', '.join(known)}")
    return found


def _rope_of(layer: Fields) -> Rope:
    """Return the rope of a layer that a manifest states."""
    rope = layer.fields("rope")
    if odd := sorted(set(rope) - {field.name for field in dataclasses.fields(Rope)}):
        raise StorageError(f"{rope.where} has unknown fields: {', '.join(odd)}.")
    if rope.text("kind") not in ROPE_KINDS:
        raise rope.wrong("kind", rope.text("kind"), f"one of {', '.join(ROPE_KINDS)}")
    rope.number("theta", *THETAS)
    stated = set(rope)
    whole = {"original_max_position": MAX_POSITIONS, "rotary_dim": MAX_SIZE}
    flags = {"truncate", "leading"}
    lists = {"short_factors", "long_factors", "exponents"}
    for name in stated - {"kind", "theta", *lists, *flags, *whole}:
        rope.number(name, 0, FACTORS[1])
    for name in stated & whole.keys():
        rope.integer(name, 0, whole[name])
    for name in sorted(stated & flags):
        rope.flag(name)
    factors = {
        name: tuple(rope.numbers(name, *(FREQUENCY_EXPONENTS if name == "exponents" else FREQUENCY_FACTORS)))
        for name in stated & lists
    }
    return Rope(**{**layer.mapping("rope"), **factors})
