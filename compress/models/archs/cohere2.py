"""Command R7B and Command A (Cohere, arXiv 2501.18795): Command R with a window in three of four layers; the
others do not encode positions."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.layer_types import every_nth_full, windows_by_layer_type
from compress.models.limits import MAX_LAYERS, SCALES
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields


def _facts(config: Fields) -> dict[str, Any]:
    return {
        "norm": "layer",
        "block": "parallel",
        "logit_scale": config.number("logit_scale", *SCALES),
    }


def _implied(config: Fields) -> dict[str, Any]:
    return every_nth_full(config, config.integer("sliding_window_pattern", 1, MAX_LAYERS, default=4))


def _rotated_layers(config: Fields, num_layers: int) -> list[bool]:
    return [window is not None for window in windows_by_layer_type(config, num_layers)]


COHERE2 = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    heads_span_hidden=True,
    windows=windows_by_layer_type,
    rotated_layers=_rotated_layers,
    facts=_facts,
    implied=_implied,
    interleaved_rotary=True,
    spelled={"rms_norm_eps": "layer_norm_eps"},
    layer_modules={name: disk for name, disk in LAYER_MODULES.items() if name != "ffn_norm"},
    known_fields=frozenset(
        {
            "attention_bias",
            "logit_scale",
            "layer_norm_eps",
            "sliding_window",
            "sliding_window_pattern",
            "layer_types",
        }
    ),
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "layer_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "logit_scale": 0.0625,
    },
)
FAMILIES.add("cohere2", COHERE2)
