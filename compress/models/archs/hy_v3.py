"""Hy3 and Hy-MT2 (Tencent, 2026): norms of each head's q and k, a first layer that is dense, and experts
chosen by the sigmoids of the router with a bias that their weights do not have. The 81st layer of Hy3, which
predicts a further token, is not read.

`transformers` reads which layers are dense from `mlp_layer_types`, vLLM and SGLang from the number of first
ones, `first_k_dense_replace`: both are written.
"""

from typing import Any

from compress.models.arch import MAX_LAYERS
from compress.models.family import FAMILIES, Family
from compress.models.mixture import (
    AS_IN_MEMORY,
    BARE,
    Mixture,
    apart,
    in_one,
    shared_of,
    sparse_after_first,
    sparse_by_type,
    state_first,
    state_types,
)
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

_FIELDS = {
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "scale": "router_scaling_factor",
}
_SHARED = "num_shared_experts"
_IN_MEMORY = {
    "moe.router": "mlp.gate",
    "moe.selection_bias": "mlp.e_score_correction_bias",
    "moe.shared.gate": "mlp.shared_experts.gate_proj",
    "moe.shared.up": "mlp.shared_experts.up_proj",
    "moe.shared.down": "mlp.shared_experts.down_proj",
}


_FIRST = "first_k_dense_replace"


def _sparse_layers(config: Fields, num_layers: int) -> list[bool]:
    """Return which layers have experts."""
    read = sparse_after_first if config.has(_FIRST) else _sparse_by_type
    return read(config, num_layers)


def _sparse_by_type(config: Fields, num_layers: int) -> list[bool]:
    """Return which layers have experts in `transformers`: all but the first where no types are stated."""
    if config.has("mlp_layer_types"):
        return sparse_by_type(config, num_layers)
    return [idx > 0 for idx in range(num_layers)]


def _state_sparse(is_sparse: list[bool]) -> dict[str, Any]:
    return {**state_types(is_sparse), **state_first(is_sparse)}


def _facts(config: Fields) -> dict[str, Any]:
    """Return no facts; refuse a config that programs read in several ways."""
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    if _sparse_layers(config, num_layers) != _sparse_by_type(config, num_layers):
        wanted = "the number of dense layers, all first, that mlp_layer_types states (1 if it is absent)"
        raise config.wrong(_FIRST, config.integer(_FIRST, 0, MAX_LAYERS), wanted)
    return {}


FAMILIES.add(
    "hy_v3",
    Family(
        model_type="hy_v3",
        architecture="HYV3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        facts=_facts,
        mixture=Mixture(
            _FIELDS,
            facts={"score": "sigmoid", "selection_bias": True, "renormalize": True},
            is_sparse=_sparse_layers,
            state_sparse=_state_sparse,
            read_more=shared_of(_SHARED),
        ),
        layer_modules={
            **LAYER_MODULES,
            "moe.router": "mlp.router.gate",
            "moe.selection_bias": "mlp.expert_bias",
            "moe.shared.gate": "mlp.shared_mlp.gate_proj",
            "moe.shared.up": "mlp.shared_mlp.up_proj",
            "moe.shared.down": "mlp.shared_mlp.down_proj",
        },
        expert_layouts=(
            apart("mlp.experts"),
            in_one(
                AS_IN_MEMORY.modules["moe.experts.*.gate"],
                AS_IN_MEMORY.modules["moe.experts.*.down"],
                suffixes=BARE,
                modules=_IN_MEMORY,
            ),
        ),
        aliases={"num_experts": "num_local_experts"},
        known_fields=frozenset(
            {
                *_FIELDS.values(),
                _SHARED,
                "attention_bias",
                "mlp_layer_types",
                _FIRST,
                "enable_moe_fp32_combine",
            }
        ),
        fixed_fields={
            "mlp_bias": False,
            "moe_router_enable_expert_bias": True,
            "moe_router_use_sigmoid": True,
            "qk_norm": True,
            "route_norm": True,
        },
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11158840.0,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 13312,
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 1536,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            _SHARED: 1,
            "router_scaling_factor": 2.826,
        },
        ignored_tensors=r"rotary_emb\.inv_freq$|^model\.layers\.80\.",
    ),
)
