"""Laguna (poolside, 2026): layers with and without a window, which have different numbers of query heads and
ropes of their own, a gate of each head, and after dense layers experts chosen by the sigmoids of the router
with a bias that their weights do not have."""

from typing import Any

from compress.models.config_facts import only_own_code
from compress.models.family import FAMILIES, Family
from compress.models.layer_shape import HeadGate
from compress.models.layer_types import FULL, SLIDING, windows_by_layer_type
from compress.models.limits import MAX_LAYERS
from compress.models.mixture import (
    AS_IN_MEMORY,
    DENSE_LAYER,
    SPARSE_LAYER,
    Mixture,
    apart,
    sparse_by_type,
    state_types,
)
from compress.models.module_names import LAYER_MODULES
from compress.models.rope_config import check_factors_of_types
from compress.untrusted.fields import Fields

_GATE = "gating"
_HEADS = "num_attention_heads_per_layer"
_FIELDS = {
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "shared_size": "shared_expert_intermediate_size",
    "scale": "moe_routed_scaling_factor",
}


def _head_gate(config: Fields) -> HeadGate:
    """Return the gate of the heads. `transformers` and vLLM differ in what any other value means."""
    stated = config.flag(_GATE) if config.is_flag(_GATE) else config.text(_GATE)
    if stated not in (True, "per-head"):
        raise config.wrong(_GATE, stated, "true or 'per-head'")
    return "softplus"


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of the layers and of their FFNs where a config states none. Refuse an `auto_map` to
    other code than the model's own from before it was in `transformers`."""
    only_own_code(config, ("LagunaConfig", "LagunaModel", "LagunaForCausalLM"))
    check_factors_of_types(config)
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    implied = {
        "layer_types": [FULL] * num_layers,
        "mlp_layer_types": [DENSE_LAYER] + [SPARSE_LAYER] * (num_layers - 1),
    }
    return {name: types for name, types in implied.items() if not config.has(name)}


FAMILIES.add(
    "laguna",
    Family(
        model_type="laguna",
        architecture="LagunaForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        head_gate=_head_gate,
        heads_by_layer=_HEADS,
        windows=windows_by_layer_type,
        implied=_implied,
        mixture=Mixture(
            _FIELDS,
            facts={"score": "sigmoid", "selection_bias": True, "renormalize": True},
            is_sparse=sparse_by_type,
            state_sparse=state_types,
        ),
        layer_modules={
            **LAYER_MODULES,
            "moe.router": "mlp.gate",
            "moe.shared.gate": "mlp.shared_expert.gate_proj",
            "moe.shared.up": "mlp.shared_expert.up_proj",
            "moe.shared.down": "mlp.shared_expert.down_proj",
            "attn.head_gate": "self_attn.g_proj",
            "moe.selection_bias": "mlp.experts.e_score_correction_bias",
        },
        expert_layouts=(apart("mlp.experts"), AS_IN_MEMORY),
        in_memory_inside={
            "mlp.shared_expert": "mlp.shared_experts",
            "mlp.experts.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
        },
        known_fields=frozenset(
            {
                *_FIELDS.values(),
                _GATE,
                _HEADS,
                "attention_bias",
                "sliding_window",
                "layer_types",
                "mlp_layer_types",
                "partial_rotary_factor",
                "auto_map",
            }
        ),
        fixed_fields={"moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0.0},
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "sliding_window": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "moe_routed_scaling_factor": 1.0,
            _GATE: True,
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
            },
        },
    ),
)
