"""The text model of North Micro Vision (Cohere, 2026): Cohere 2 whose heads rotate by halves, and whose
config states a rope for each type of layer, null for one that encodes no positions. Sections of a rope for
the time, height and width of a token are equal for text, so that it is the plain rope there."""

from dataclasses import replace
from typing import Any

from compress.models.archs.cohere2 import COHERE2
from compress.models.archs.smollm3 import rotated_layers
from compress.models.family import FAMILIES
from compress.models.layer_types import layer_types
from compress.models.limits import MAX_LAYERS, SCALES
from compress.models.rope_config import without_sections
from compress.untrusted.fields import Fields

_ROPES = "rope_parameters"


def _facts(config: Fields) -> dict[str, Any]:
    """Return the facts of Cohere 2, whose logits have no factor where the config states none."""
    return {
        "norm": "layer",
        "block": "parallel",
        "logit_scale": config.number("logit_scale", *SCALES, default=1.0),
    }


def _implied(config: Fields) -> dict[str, Any]:
    """Return the ropes as they are for text, which layers rotate (`no_rope_layers` has 1 for those that do),
    and full attention for all where the config states no types.

    Raises:
        UnsupportedArch: a type of layer has no rope, not even null; `transformers` has no default for it.
    """
    types = layer_types(config, config.integer("num_hidden_layers", 1, MAX_LAYERS))
    stated = config.mapping(_ROPES, default={})
    ropes: dict[str, Any] = {}
    for kind in dict.fromkeys(types):
        if kind not in stated:
            wanted = f"stated for layers of the type {kind}, as a mapping or as null"
            raise config.wrong(_ROPES, stated, wanted)
        ropes[kind] = without_sections(config.fields(_ROPES).mapping(kind, default={}))
    rotates = [int(bool(ropes[kind])) for kind in types]
    plain = {kind: rope or {"rope_theta": 10000.0} for kind, rope in ropes.items()}
    return {_ROPES: plain, "no_rope_layers": rotates, "layer_types": types}


COHERE_COMPASS_TEXT = replace(
    COHERE2,
    model_type="cohere_compass_text",
    architecture="CohereCompassForCausalLM",
    interleaved_rotary=False,
    facts=_facts,
    implied=_implied,
    rotated_layers=rotated_layers,
    known_fields=COHERE2.known_fields - {"sliding_window_pattern"},
    defaults={
        **{
            name: each for name, each in COHERE2.defaults.items() if name not in ("rope_theta", "logit_scale")
        },
        "vocab_size": 256000,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
    },
)

FAMILIES.add("cohere_compass_text", COHERE_COMPASS_TEXT)
