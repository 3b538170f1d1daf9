"""dots.llm1 (arXiv 2506.05767): norms of each head of q and k, a first layer that is dense, and experts
chosen by the sigmoids of the router with a bias that their weights do not have."""

from compress.models.archs.glm4_moe import MIXTURE_FIELDS, MIXTURE_MODULES, SIGMOID_MIXTURE
from compress.models.family import FAMILIES, Family
from compress.models.layer_types import windows_by_layer_type
from compress.models.mixture import AS_IN_MEMORY, apart
from compress.models.module_names import LAYER_MODULES

FAMILIES.add(
    "dots1",
    Family(
        model_type="dots1",
        architecture="Dots1ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        windows=windows_by_layer_type,
        mixture=SIGMOID_MIXTURE,
        layer_modules={**LAYER_MODULES, **MIXTURE_MODULES},
        expert_layouts=(apart("mlp.experts"), AS_IN_MEMORY),
        known_fields=MIXTURE_FIELDS
        | {"attention_bias", "sliding_window", "max_window_layers", "layer_types"},
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
