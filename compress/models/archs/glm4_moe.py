"""GLM-4.5 and its successors (arXiv 2508.06471): the first layers are dense, half of each head rotates, and
experts are chosen by the sigmoids of the router with a bias that their weights do not have. Layers that
predict further tokens come after the last (`mtp.py`)."""

from compress.models.family import FAMILIES, Family
from compress.models.mixture import AS_IN_MEMORY, Mixture, apart, shared_of, sparse_after_first, state_first
from compress.models.module_names import LAYER_MODULES
from compress.models.mtp_names import AFTER_LAST

SIGMOID_MIXTURE = Mixture(
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
)
"""Experts as DeepSeek-V3 has them (arXiv 2412.19437), and the names of its fields."""
MIXTURE_MODULES = {
    "moe.router": "mlp.gate",
    "moe.selection_bias": "mlp.gate.e_score_correction_bias",
    "moe.shared.gate": "mlp.shared_experts.gate_proj",
    "moe.shared.up": "mlp.shared_experts.up_proj",
    "moe.shared.down": "mlp.shared_experts.down_proj",
}
MIXTURE_FIELDS = frozenset({*SIGMOID_MIXTURE.fields.values(), "n_shared_experts", "first_k_dense_replace"})

GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    qkv_bias="attention_bias",
    qk_norm="use_qk_norm",
    mixture=SIGMOID_MIXTURE,
    mtp=AFTER_LAST,
    layer_modules={**LAYER_MODULES, **MIXTURE_MODULES},
    expert_layouts=(apart("mlp.experts"), AS_IN_MEMORY),
    known_fields=MIXTURE_FIELDS
    | {
        "attention_bias",
        "use_qk_norm",
        "partial_rotary_factor",
        "num_nextn_predict_layers",
        "num_mtp_layers",
    },
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "num_key_value_heads": 8,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": False,
    },
)

FAMILIES.add("glm4_moe", GLM4_MOE)
