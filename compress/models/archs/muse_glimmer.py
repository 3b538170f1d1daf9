"""Muse Glimmer (Meta, 2026) with its vision tower. The text model norms the embedding, has four norms a layer
with an eps of their own after the half-layers, attention with an output gate whose heads of q and k are
normed without a weight, and in every fourth layer, counted from the last, neither a window nor a rope."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.layer_types import FULL, SLIDING, windows_by_layer_type
from compress.models.limits import MAX_LAYERS, MAX_SIZE, SCALES, THETAS
from compress.models.module_names import LAYER_MODULES, SANDWICH_NORMS
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, wrapper
from compress.untrusted.fields import Fields

THETA_BY_LAYER = "layer_rope_theta"
_THETA = 1e4


def facts_of(config: Fields) -> dict[str, Any]:
    heads_scale = config.integer("head_dim", 1, MAX_SIZE) ** -0.5
    return {
        "norm_offset": 1.0,
        "plain_final_norm": True,
        "post_norm_eps": config.number("post_norm_eps", 0, 1),
        "block": "sandwich",
        "unit_qk_norm": True,
        "unit_norm_unrotated": True,
        "embed_norm": True,
        "attn_scale": config.number("qk_scale_factor", *SCALES) * heads_scale,
        "logit_scale": config.number("output_multiplier", *SCALES),
        "logit_softcap": config.number("final_logit_softcapping", 1e-3, SCALES[1]),
    }


def implied_layers(config: Fields) -> dict[str, Any]:
    """Return which layers have a window and a rope, of a config that does not state them."""
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    is_full = [(num_layers - 1 - idx) % 4 == 0 for idx in range(num_layers)]
    implied = {
        "layer_types": [FULL if each else SLIDING for each in is_full],
        THETA_BY_LAYER: [0 if each else theta_of(config) for each in is_full],
    }
    return {name: value for name, value in implied.items() if not config.has(name)}


def theta_of(config: Fields) -> float:
    """Return the base frequency of the one rope."""
    stated = config.number("rope_theta", *THETAS, default=_THETA)
    return config.fields("rope_parameters", default={}).number("rope_theta", *THETAS, default=stated)


def rotated_layers(config: Fields, num_layers: int) -> list[bool]:
    """Return which layers encode positions: those whose base frequency is not 0, but that of the one rope.

    Raises:
        UnsupportedArch: a layer has another, or fewer are stated than there are layers.
    """
    stated = config.numbers(THETA_BY_LAYER, 0, THETAS[1])
    theta = theta_of(config)
    if len(stated) < num_layers or set(stated) - {0, theta}:
        raise config.wrong(THETA_BY_LAYER, stated, f"{num_layers} numbers, of which each is 0 or {theta:g}")
    return [each != 0 for each in stated[:num_layers]]


_TEXT = Family(
    model_type="muse_glimmer_text",
    architecture="MuseGlimmerForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    heads_divide_hidden=True,
    output_gate=True,
    windows=windows_by_layer_type,
    rotated_layers=rotated_layers,
    facts=facts_of,
    implied=implied_layers,
    spelled={"hidden_act": "hidden_activation"},
    layer_modules={**LAYER_MODULES, **SANDWICH_NORMS, "attn.gate": "self_attn.gate_proj"},
    known_fields=frozenset(
        {
            "attention_bias",
            "sliding_window",
            "layer_types",
            THETA_BY_LAYER,
            "qk_scale_factor",
            "output_multiplier",
            "post_norm_eps",
            "final_logit_softcapping",
        }
    ),
    defaults={
        "hidden_activation": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": _THETA,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 19968,
        "max_position_embeddings": 131072,
        "sliding_window": 2048,
        "qk_scale_factor": 3.87,
        "output_multiplier": 0.19611613513818404,
        "post_norm_eps": 1e-8,
        "final_logit_softcapping": 20.0,
    },
)

FAMILIES.add(
    "muse_glimmer",
    wrapper(
        "muse_glimmer",
        "MuseGlimmerForConditionalGeneration",
        _TEXT,
        **{
            **LANGUAGE_MODEL_NAMES,
            "untouched": ("model.vision_tower", "model.vision_adapter", "model.vision_projection"),
            "untouched_elsewhere": ("vision_encoder",),
        },
    ),
)
