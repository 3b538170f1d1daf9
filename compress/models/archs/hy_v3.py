"""Hy3 and Hy-MT2 (Tencent, 2026): norms of each head's q and k, a first layer that is dense, and experts
chosen by the sigmoids of the router with a bias that their weights do not have. The 81st layer of Hy3
predicts a further token (`mtp.py`).

`transformers` reads which layers are dense from `mlp_layer_types`, vLLM and SGLang from the number of first
ones, `first_k_dense_replace`: both are written.
"""

from compress.models.family import FAMILIES, Family
from compress.models.mixture import (
    AS_IN_MEMORY,
    BARE,
    Mixture,
    apart,
    in_one,
    same_dense_layers,
    shared_of,
    sparse_by_both,
    state_both,
)
from compress.models.module_names import LAYER_MODULES
from compress.models.mtp_names import AFTER_LAST_WITH_FINAL_NORM

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


FAMILIES.add(
    "hy_v3",
    Family(
        model_type="hy_v3",
        architecture="HYV3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        facts=same_dense_layers,
        mixture=Mixture(
            _FIELDS,
            facts={"score": "sigmoid", "selection_bias": True, "renormalize": True},
            is_sparse=sparse_by_both,
            state_sparse=state_both,
            read_more=shared_of(_SHARED),
        ),
        mtp=AFTER_LAST_WITH_FINAL_NORM,
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
                "first_k_dense_replace",
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
