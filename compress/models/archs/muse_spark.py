"""Muse Spark (Meta, 2026) with its vision and audio towers. Its text model is Muse Glimmer with experts: they
act on latents, which are normed before them, and the output of each is normed, too. Outputs of half-layers
are added to the residual with gates for each channel, and what each head of attention returns is normed."""

from dataclasses import replace
from typing import Any

from compress.models.archs.muse_glimmer import (
    THETA_BY_LAYER,
    facts_of,
    implied_layers,
    rotated_layers,
)
from compress.models.experts import LATENT_IN, LATENT_NORM, LATENT_OUT, OUT_NORM
from compress.models.family import FAMILIES, Family
from compress.models.gated_sum import FFN_SCALE, GATES, LEAST_TEMPERATURE, GatedSums
from compress.models.layer_shape import LayerShape
from compress.models.layer_types import windows_by_layer_type
from compress.models.limits import SCALES
from compress.models.mixture import AS_IN_MEMORY, Mixture, apart, sparse_by_type, state_types
from compress.models.module_names import LAYER_MODULES
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, wrapper
from compress.untrusted.fields import Fields

_FIELDS = {
    "num_experts": "num_local_experts",
    "top_k": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "latent_size": "moe_hidden_size",
    "scale": "routed_scaling_factor",
}
_TEMPERATURE = "residual_gate_temperature"
_TIES = "tie_word_embeddings"
_NORM_OF_FFN = "post_feedforward_layernorm"


def _facts(config: Fields) -> dict[str, Any]:
    """Return the facts of Muse Glimmer, with gated sums in place of the norms after half-layers.

    Raises:
        UnsupportedArch: the head is the embedding, which the class of `transformers` does not compute.
    """
    if config.flag(_TIES):
        raise config.wrong(_TIES, True, "false: the class of this family has a head of its own")
    temperature = config.number(_TEMPERATURE, LEAST_TEMPERATURE, SCALES[1])
    return {**facts_of(config), "block": "pre", "hyper": GatedSums(temperature)}


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Return the layers with norms of what their heads return."""
    del config
    return tuple(replace(layer, out_norm=True) for layer in layers)


def _router_scale(config: Fields) -> dict[str, Any]:
    """Return the factor of the router's logits, which is that of the logits of the model."""
    return {"router_scale": config.number("output_multiplier", *SCALES)}


_TEXT = Family(
    model_type="muse_spark_text",
    architecture="MuseSparkForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    heads_divide_hidden=True,
    output_gate=True,
    windows=windows_by_layer_type,
    rotated_layers=rotated_layers,
    facts=_facts,
    shapes=_shapes,
    implied=implied_layers,
    mixture=Mixture(
        _FIELDS,
        facts={"score": "sigmoid", "selection_bias": True, "renormalize": True, "latent_norms": True},
        is_sparse=sparse_by_type,
        state_sparse=state_types,
        read_more=_router_scale,
    ),
    layer_modules={
        **LAYER_MODULES,
        "attn.gate": "self_attn.gate_proj",
        "ffn_norm": "pre_feedforward_layernorm",
        f"attn_hyper.{GATES}": "post_attention_residual_gate.gate",
        f"ffn_hyper.{GATES}": "post_feedforward_residual_gate.gate",
        f"ffn_hyper.{FFN_SCALE.removesuffix('.weight')}": _NORM_OF_FFN,
        "moe.router": "mlp.gate",
        "moe.selection_bias": "mlp.gate.e_score_correction_bias",
        f"moe.{LATENT_IN}": "mlp.pre_expert_proj",
        f"moe.{LATENT_OUT}": "mlp.post_expert_proj",
        LATENT_NORM: "mlp.pre_expert_norm",
        OUT_NORM: "mlp.experts.post_expert_norm",
    },
    expert_layouts=(AS_IN_MEMORY, apart("mlp.experts", methods=("compressed-tensors",))),
    known_fields=frozenset(
        {
            *_FIELDS.values(),
            _TEMPERATURE,
            "mlp_layer_types",
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
        "hidden_act": "silu",
        _TIES: False,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "num_key_value_heads": 16,
        "head_dim": 64,
        "intermediate_size": 16384,
        "max_position_embeddings": 1048576,
        "sliding_window": 2048,
        "qk_scale_factor": 5.4730064863875,
        "output_multiplier": 0.1767766952966369,
        "post_norm_eps": 1e-8,
        "final_logit_softcapping": 20.0,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 4096,
        "moe_hidden_size": 4096,
        "routed_scaling_factor": 1.0,
        _TEMPERATURE: 0.3,
    },
)

FAMILIES.add(
    "muse_spark",
    wrapper(
        "muse_spark",
        "MuseSparkForConditionalGeneration",
        _TEXT,
        **{
            **LANGUAGE_MODEL_NAMES,
            "untouched": (
                "model.vision_tower",
                "model.vision_adapter",
                "model.vision_projection",
                "model.audio_tower",
            ),
        },
    ),
)
