"""Ministral 3 (Mistral AI, 2025): Mistral with YaRN, and queries that grow with the position beyond the
length of the first training."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.layer_types import same_window
from compress.models.limits import MAX_POSITIONS
from compress.untrusted.fields import Fields

# Fields of its `rope_parameters` that are not the rope's; the second one nobody reads.
_GROWTH = "llama_4_scaling_beta"
_FOREIGN = (_GROWTH, "max_position_embeddings")
# The growth once more, where vLLM looks for it; exports have both (`export/restated.py`).
RESTATED_GROWTH = "llama_4_scaling"
_ORIGINAL = "original_max_position_embeddings"


def growing_rope(config: Fields, default: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rope, by default that of `default`, and the growth of queries as a field of the model."""
    older = config.mapping("rope_scaling", default=default)
    rope = config.mapping("rope_parameters", default=older)
    plain = {name: value for name, value in rope.items() if name not in _FOREIGN}
    return {"rope_parameters": plain, _GROWTH: rope.get(_GROWTH)}


def growth_of_queries(config: Fields) -> dict[str, Any]:
    """Return the growth of queries by `growing_rope`."""
    num_positions = config.fields("rope_parameters").integer(_ORIGINAL, 1, MAX_POSITIONS)
    growth = config.number(_GROWTH, 0, 1e6), num_positions
    if config.has(RESTATED_GROWTH):
        stated = config.fields(RESTATED_GROWTH)
        other = stated.number("beta", 0, 1e6), stated.integer(_ORIGINAL, 1, MAX_POSITIONS)
        if other != growth:
            raise stated.wrong("beta and length", other, f"{growth}, as in rope_parameters")
    return {"query_growth": growth}


_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    _ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _GROWTH: 0.1,
}

MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    windows=same_window,
    facts=growth_of_queries,
    implied=partial(growing_rope, default=_DEFAULT_ROPE),
    known_fields=frozenset({"sliding_window", RESTATED_GROWTH}),
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
    },
)

FAMILIES.add("ministral3", MINISTRAL3)
