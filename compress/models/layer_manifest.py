"""The shape of a layer as the manifest of an artifact states it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from compress.errors import StorageError
from compress.models.experts import Experts
from compress.models.latent import Latent
from compress.models.layer_shape import HALVES, LayerShape, Rope
from compress.models.limits import (
    FACTORS,
    FREQUENCY_FACTORS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_SIZE,
    ROPE_KINDS,
    THETAS,
)
from compress.models.recurrences import RECURRENCES
from compress.untrusted.fields import Fields

_RARE_ROPE_FIELDS = ("rotary_dim", "leading", "short_factors", "long_factors")


def layer_to_json(shape: LayerShape) -> dict[str, Any]:
    """Return the facts of a layer; those of few models are left out where a layer does not have them."""
    layer = dataclasses.asdict(shape)
    if shape.experts is not None:
        layer["experts"] = shape.experts.to_json()
    for name in ("experts", "keys_are_values", "chunk", "latent", "output_gate", "recurrence", "only_half"):
        if not getattr(shape, name):
            del layer[name]
    if shape.recurrence is not None:
        layer[shape.recurrence.module] = layer.pop("recurrence")
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
    half = next((each for each in HALVES if each == stored.get("only_half")), None)
    if half is None and layer.has("only_half"):
        raise layer.wrong("only_half", layer.text("only_half"), f"one of {', '.join(HALVES)}")
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
        recurrence=next(
            (kind.from_json(layer.fields(kind.module)) for kind in RECURRENCES if layer.has(kind.module)),
            None,
        ),
        kv_source=layer.integer("kv_source", 0, MAX_LAYERS) if layer.has("kv_source") else None,
        only_half=half,
        gated=layer.flag("gated", default=True),
    )


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
    for name in stated - {"kind", "theta", "short_factors", "long_factors", *flags, *whole}:
        rope.number(name, 0, FACTORS[1])
    for name in stated & whole.keys():
        rope.integer(name, 0, whole[name])
    for name in sorted(stated & flags):
        rope.flag(name)
    factors = {
        name: tuple(rope.numbers(name, *FREQUENCY_FACTORS))
        for name in stated & {"short_factors", "long_factors"}
    }
    return Rope(**{**layer.mapping("rope"), **factors})
