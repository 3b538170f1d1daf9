"""Solar Open 100B (Upstage, 2026): the experts of GLM-4.5 in every layer, and heads that rotate whole."""

from dataclasses import replace

from compress.models.archs.glm4_moe import GLM4_MOE, MIXTURE_FIELDS, SIGMOID_MIXTURE
from compress.models.family import FAMILIES
from compress.models.mixture import Mixture

FAMILIES.add(
    "solar_open",
    replace(
        GLM4_MOE,
        model_type="solar_open",
        architecture="SolarOpenForCausalLM",
        qk_norm=False,
        mixture=Mixture(SIGMOID_MIXTURE.fields, SIGMOID_MIXTURE.facts, read_more=SIGMOID_MIXTURE.read_more),
        known_fields=MIXTURE_FIELDS - {"first_k_dense_replace"} | {"attention_bias"},
        fixed_fields={"first_k_dense_replace": 0, "use_qk_norm": False, "partial_rotary_factor": 1.0},
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1280,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
)
