"""Rotary embeddings in `config.json`: `rope_parameters` (flat, or one mapping per layer type), or the older
pair of fields.
"""

import math
from collections.abc import Mapping
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import ROPE_KINDS, Rope

ROPE_FIELDS = frozenset(
    [
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ]
)


def read_rope(config: Mapping[str, Any], layer_type: str) -> Rope:
    """Read the rope of one layer from `rope_parameters` (flat, or one mapping per layer type) or the older
    `rope_theta` + `rope_scaling`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        rope = dict(rope[layer_type])
    unknown = sorted(key for key, value in rope.items() if key not in ROPE_FIELDS and value is not None)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if unknown or kind not in ROPE_KINDS:
        what = f"field(s) {', '.join(unknown)}" if unknown else f"rope_type '{kind}'"
        raise UnsupportedArch(
            f"rope_parameters has {what}, not known here; known rope types: {', '.join(ROPE_KINDS)}."
        )
    theta = rope.get("rope_theta") or config.get("rope_theta")
    if theta is None:
        raise KeyError("rope_theta")
    factor = float(rope.get("factor") or 1.0)
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return Rope(
        theta=float(theta),
        kind=kind,
        factor=factor,
        original_max_position=int(original or config["max_position_embeddings"])
        if kind in ("llama3", "yarn")
        else 0,
        low_freq_factor=float(rope.get("low_freq_factor") or 1.0),
        high_freq_factor=float(rope.get("high_freq_factor") or 4.0),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=_yarn_attention_factor(rope, factor) if kind == "yarn" else 1.0,
    )


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """Return the softmax temperature of YaRN folded into cos and sin: 0.1 ln(factor) + 1, or what the config
    states."""

    def temperature(scale: float, mscale: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return temperature(factor, rope["mscale"]) / temperature(factor, rope["mscale_all_dim"])
    return temperature(factor)
