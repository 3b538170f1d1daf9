"""MiniMax-Text-01 (MiniMax, arXiv 2501.08313) as it was published, with its own code: the model of
`minimax.py` with other names of fields. vLLM has a class of this name, and `transformers` loads it with that
code only."""

from dataclasses import replace
from typing import Any

from compress.models.archs.minimax import FACTORS, MINIMAX, rotated_part
from compress.models.config_facts import only_own_code
from compress.models.family import FAMILIES
from compress.models.layer_types import FULL, LINEAR
from compress.models.limits import MAX_LAYERS
from compress.untrusted.fields import Fields

_TYPES = "attn_type_list"
_OWN_CODE = (
    *("MiniMaxText01Config", "MiniMaxText01ForCausalLM"),
    *("MiniMaxM1Config", "MiniMaxM1ForCausalLM"),
)
SPELLED = {
    name: "layernorm_"
    + name.removesuffix("_factor")
    .replace("full_attn", "full_attention")
    .replace("linear_attn", "linear_attention")
    for name in FACTORS.values()
}
"""The fields that state the factors of half-layers, by their names in `transformers`."""


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of the layers, 1 for attention and 0 for lightning attention, and the part of a head
    that rotates. Refuse an `auto_map` that names other code than the one the model was published with."""
    only_own_code(config, _OWN_CODE)
    if not config.flag("postnorm", default=False):  # the published code has another residual then
        raise config.wrong("postnorm", False, "true")
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    types = config.integers(_TYPES, 0, 1)
    if len(types) < num_layers:
        raise config.wrong(_TYPES, list(types), f"a list of {num_layers} types")
    return {**rotated_part(config), "layer_types": [FULL if each else LINEAR for each in types]}


MINIMAX_TEXT_01 = replace(
    MINIMAX,
    model_type="minimax_text_01",
    architecture="MiniMaxText01ForCausalLM",
    implied=_implied,
    spelled=SPELLED,
    computed_otherwise=None,
    known_fields=(MINIMAX.known_fields - {"layer_types", *SPELLED}) | {"auto_map", _TYPES, *SPELLED.values()},
    defaults={name: value for name, value in MINIMAX.defaults.items() if name not in SPELLED}
    | dict.fromkeys(SPELLED.values(), 1.0),
)

FAMILIES.add("minimax_text_01", MINIMAX_TEXT_01)
