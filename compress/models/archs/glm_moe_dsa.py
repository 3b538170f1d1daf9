"""GLM-5 (Z.ai, 2026): latent attention and experts of DeepSeek-V3.2. A layer has an indexer of its own, or
attends to the keys that the last one before it has chosen. The layer that predicts a further token comes
after the last (`mtp.py`)."""

from dataclasses import replace
from typing import Any

from compress.models.archs.deepseek_v32 import DEEPSEEK_V32, INDEX_PAIRS, with_indexers
from compress.models.family import FAMILIES
from compress.models.layer_shape import LayerShape
from compress.models.limits import MAX_LAYERS
from compress.untrusted.fields import Fields

_KINDS = "indexer_types"
_PATTERN = "index_topk_pattern"
_EVERY = "index_topk_freq"
_FIRST = "index_skip_topk_offset"
_LETTERS = {"F": "full", "S": "shared"}
KIND_FIELDS = frozenset({_KINDS, _PATTERN, _EVERY, _FIRST})
"""The fields that state whose indexer each layer has."""


def indexer_kinds(config: Fields, num_layers: int) -> list[str]:
    """Return whether the indexer of each layer is its own (`full`) or `shared` with the one before."""
    if config.has(_KINDS):
        kinds = config.texts(_KINDS)
    elif config.is_list(_PATTERN):
        kinds = config.texts(_PATTERN)
    elif config.has(_PATTERN):
        kinds = [_LETTERS.get(letter, letter) for letter in config.text(_PATTERN)]
    else:
        every = max(config.integer(_EVERY, 0, MAX_LAYERS, default=1), 1)
        first = config.integer(_FIRST, 0, MAX_LAYERS, default=2)
        kinds = [_LETTERS["S" if max(idx - first + 1, 0) % every else "F"] for idx in range(num_layers)]
    if len(kinds) < num_layers or set(kinds) - set(_LETTERS.values()) or kinds[0] != "full":
        name = _KINDS if config.has(_KINDS) else _PATTERN
        raise config.wrong(name, kinds, f"{num_layers} times full or shared, the first full")
    return kinds[:num_layers]


def _implied(config: Fields) -> dict[str, Any]:
    """Return the standard fields of DeepSeek-V3.2, and whose indexer each layer has."""
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    return {**DEEPSEEK_V32.implied(config), _KINDS: indexer_kinds(config, num_layers)}


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    which = [kind == "full" for kind in indexer_kinds(config, len(layers))]
    return with_indexers(config, layers, which, interleaved=True)


FAMILIES.add(
    "glm_moe_dsa",
    replace(
        DEEPSEEK_V32,
        model_type="glm_moe_dsa",
        architecture="GlmMoeDsaForCausalLM",
        implied=_implied,
        shapes=_shapes,
        known_fields=DEEPSEEK_V32.known_fields | KIND_FIELDS,
        fixed_fields={**DEEPSEEK_V32.fixed_fields, INDEX_PAIRS: True},
        defaults={
            **DEEPSEEK_V32.defaults,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 64,
            "intermediate_size": 12288,
            "max_position_embeddings": 202752,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_group": 1,
            "topk_group": 1,
            "index_n_heads": 32,
        },
    ),
)
