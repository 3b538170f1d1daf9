"""DeepSeek-V3 and R1 (arXiv 2412.19437) and Moonlight: latent attention, first layers that are dense, and
experts chosen by the sigmoids of the router with a bias that their weights do not have. The layer that
predicts a further token comes after the last (`mtp.py`)."""

from compress.models.archs.glm4_moe import MIXTURE_FIELDS, MIXTURE_MODULES, SIGMOID_MIXTURE
from compress.models.config_facts import implies_own_code
from compress.models.family import FAMILIES, Family
from compress.models.latent_config import LATENT_MODULES, latent_of
from compress.models.mixture import AS_IN_MEMORY, apart
from compress.models.module_names import LAYER_MODULES
from compress.models.mtp_names import AFTER_LAST

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    latent=latent_of("rope_interleave"),
    implied=implies_own_code("DeepseekV3Config", "DeepseekV3Model", "DeepseekV3ForCausalLM"),
    mixture=SIGMOID_MIXTURE,
    mtp=AFTER_LAST,
    layer_modules={**LAYER_MODULES, **LATENT_MODULES, **MIXTURE_MODULES},
    expert_layouts=(apart("mlp.experts"), AS_IN_MEMORY),
    known_fields=MIXTURE_FIELDS
    | {"attention_bias", "rope_interleave", "num_nextn_predict_layers", "num_mtp_layers", "auto_map"},
    fixed_fields={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_interleave": True,
        "num_key_value_heads": 128,
        "intermediate_size": 18432,
        "max_position_embeddings": 4096,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
    },
)

FAMILIES.add("deepseek_v3", DEEPSEEK_V3)
