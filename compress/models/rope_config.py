"""How `config.json` states rotary embeddings: `rope_parameters` (flat, or one mapping per layer type), or the older pair of fields."""

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
    """Rope of one layer from `rope_parameters` (flat, or one mapping per layer type) or the older `rope_theta` + `rope_scaling`."""
    said = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in said.values()):
        said = dict(said[layer_type])
    unknown = sorted(key for key, value in said.items() if key not in ROPE_FIELDS and value is not None)
    kind = said.get("rope_type") or said.get("type") or "default"
    if unknown or kind not in ROPE_KINDS:
        what = f"field(s) {', '.join(unknown)}" if unknown else f"rope_type '{kind}'"
        raise UnsupportedArch(
            f"rope_parameters has {what}, not known here; known rope types: {', '.join(ROPE_KINDS)}."
        )
    theta = said.get("rope_theta") or config.get("rope_theta")
    if theta is None:
        raise KeyError("rope_theta")
    factor = float(said.get("factor") or 1.0)
    original = said.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return Rope(
        theta=float(theta),
        kind=kind,
        factor=factor,
        original_max_position=int(original or config["max_position_embeddings"])
        if kind in ("llama3", "yarn")
        else 0,
        low_freq_factor=float(said.get("low_freq_factor") or 1.0),
        high_freq_factor=float(said.get("high_freq_factor") or 4.0),
        beta_fast=float(said.get("beta_fast") or 32.0),
        beta_slow=float(said.get("beta_slow") or 1.0),
        truncate=bool(said.get("truncate", True)),
        attention_factor=_yarn_attention_factor(said, factor) if kind == "yarn" else 1.0,
    )


def _yarn_attention_factor(said: Mapping[str, Any], factor: float) -> float:
    """The softmax temperature of YaRN folded into cos and sin: 0.1 ln(factor) + 1, or what the config states."""

    def temperature(scale: float, mscale: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    if said.get("attention_factor") is not None:
        return float(said["attention_factor"])
    if said.get("mscale") and said.get("mscale_all_dim"):
        return temperature(factor, said["mscale"]) / temperature(factor, said["mscale_all_dim"])
    return temperature(factor)
