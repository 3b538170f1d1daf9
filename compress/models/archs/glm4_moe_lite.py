"""GLM-4.7-Flash (2026): the experts of GLM-4.5 with latent attention, and a first layer that is dense. The
layer that predicts a further token comes after the last (`mtp.py`). Which layers are dense is stated twice
(`mixture.py`)."""

from dataclasses import replace

from compress.models.archs.glm4_moe import MIXTURE_FIELDS, MIXTURE_MODULES, SIGMOID_MIXTURE
from compress.models.family import FAMILIES, Family
from compress.models.latent_config import LATENT_MODULES, latent_of
from compress.models.mixture import AS_IN_MEMORY, apart, same_dense_layers, sparse_by_both, state_both
from compress.models.module_names import LAYER_MODULES
from compress.models.mtp_names import AFTER_LAST

FAMILIES.add(
    "glm4_moe_lite",
    Family(
        model_type="glm4_moe_lite",
        architecture="Glm4MoeLiteForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        latent=latent_of("rope_interleave"),
        facts=same_dense_layers,
        mixture=replace(SIGMOID_MIXTURE, is_sparse=sparse_by_both, state_sparse=state_both),
        mtp=AFTER_LAST,
        layer_modules={**LAYER_MODULES, **LATENT_MODULES, **MIXTURE_MODULES},
        expert_layouts=(apart("mlp.experts"), AS_IN_MEMORY),
        known_fields=MIXTURE_FIELDS
        | {
            "attention_bias",
            "mlp_layer_types",
            "rope_interleave",
            "partial_rotary_factor",
            "num_nextn_predict_layers",
            "num_mtp_layers",
        },
        fixed_fields={
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_interleave": True,
            "num_key_value_heads": 20,
            "intermediate_size": 10240,
            "max_position_embeddings": 202752,
            "kv_lora_rank": 512,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
)
