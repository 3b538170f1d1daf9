"""dots.llm1 (arXiv 2506.05767): norms of each head of q and k, a first layer that is dense, and experts
chosen by the sigmoids of the router with a bias that their weights do not have."""

from compress.models.family import FAMILIES, LAYER_MODULES, Family
from compress.models.layer_types import windows_by_layer_type
from compress.models.mixture import (
    AS_IN_MEMORY,
    Mixture,
    apart,
    shared_of,
    sparse_after_first,
    state_first,
)

FAMILIES.add(
    "dots1",
    Family(
        model_type="dots1",
        architecture="Dots1ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        windows=windows_by_layer_type,
        mixture=Mixture(
            {
                "num_experts": "n_routed_experts",
                "top_k": "num_experts_per_tok",
                "expert_size": "moe_intermediate_size",
                "renormalize": "norm_topk_prob",
                "scale": "routed_scaling_factor",
                "num_groups": "n_group",
                "top_groups": "topk_group",
            },
            facts={"score": "sigmoid", "selection_bias": True},
            is_sparse=sparse_after_first,
            state_sparse=state_first,
            read_more=shared_of("n_shared_experts"),
        ),
        layer_modules={
            **LAYER_MODULES,
            "moe.router": "mlp.gate",
            "moe.selection_bias": "mlp.gate.e_score_correction_bias",
            "moe.shared.gate": "mlp.shared_experts.gate_proj",
            "moe.shared.up": "mlp.shared_experts.up_proj",
            "moe.shared.down": "mlp.shared_experts.down_proj",
        },
        expert_layouts=(apart("mlp.experts"), AS_IN_MEMORY),
        known_fields=frozenset(
            {
                "attention_bias",
                "sliding_window",
                "max_window_layers",
                "layer_types",
                "n_routed_experts",
                "n_shared_experts",
                "num_experts_per_tok",
                "moe_intermediate_size",
                "norm_topk_prob",
                "routed_scaling_factor",
                "n_group",
                "topk_group",
                "first_k_dense_replace",
            }
        ),
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "num_key_value_heads": 32,
            "intermediate_size": 10944,
            "max_position_embeddings": 2048,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
    ),
)
