"""Configs of tiny models, one of every family, whose every width is a multiple of 128."""

from typing import Any

SMALL: dict[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.015625,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
_LATENT = {
    "head_dim": 64,  # what `transformers` calls the dimensions that rotate
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,  # with the next, the one size for which vLLM has kernels on a CPU
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "n_group": 1,
    "topk_group": 1,
}
_LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75},
    "gemma": {
        "architectures": ["GemmaForCausalLM"],
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "tie_word_embeddings": True,  # as every checkpoint of the family; vLLM's class has no other head
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 32,
        "query_pre_attn_scalar": 64,
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 32,
        "query_pre_attn_scalar": 64,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma4_text": {
        "architectures": ["Gemma4ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": 128,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "tie_word_embeddings": True,
    },
    "granite": {"architectures": ["GraniteForCausalLM"], **_GRANITE},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm": {"architectures": ["GlmForCausalLM"], "partial_rotary_factor": 0.5, "attention_bias": True},
    "glm4": {"architectures": ["Glm4ForCausalLM"], "partial_rotary_factor": 0.5, "attention_bias": True},
    "ministral3": {
        "architectures": ["Ministral3ForCausalLM"],
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "exaone4": {
        "architectures": ["Exaone4ForCausalLM"],
        "sliding_window": 32,
        "sliding_window_pattern": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "ernie4_5": {"architectures": ["Ernie4_5ForCausalLM"], "use_bias": False},
    "cohere": {
        "architectures": ["CohereForCausalLM"],
        "logit_scale": 0.25,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,  # vLLM takes the embedding for the head whatever the config says
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": False,
    },
    "olmoe": {"architectures": ["OlmoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2},
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 256,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
    },
    "glm4_moe_lite": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        **_LATENT,
        "q_lora_rank": 128,
        "mlp_layer_types": ["dense", "sparse"],
        "first_k_dense_replace": 1,  # which vLLM's class reads
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",  # without it vLLM's class has no place for the bias of the router
    },
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        **_LATENT,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
        "topk_method": "greedy",
        "scoring_func": "softmax",
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        **_LATENT,
        "q_lora_rank": 128,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "cohere2": {
        "architectures": ["Cohere2ForCausalLM"],
        "logit_scale": 0.25,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "seed_oss": {"architectures": ["SeedOssForCausalLM"], "attention_bias": True, "residual_dropout": 0.0},
    "ernie4_5_moe": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 256,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 1,
        "moe_layer_interval": 1,
        "use_bias": False,
    },
    "minimax_m2": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rotary_dim": 32,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "use_routing_bias": True,  # without it vLLM's class has no place for the bias
    },
    "dots1": {
        "architectures": ["Dots1ForCausalLM"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 256,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "sliding_window": None,
        "layer_types": ["full_attention", "full_attention"],
    },
    "granitemoe": {"architectures": ["GraniteMoeForCausalLM"], **_GRANITE, **_LOCAL_EXPERTS},
    "granitemoeshared": {
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "shared_intermediate_size": 512,
        **_GRANITE,
        **_LOCAL_EXPERTS,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "swiglu_limit": 7.0,
        "rope_parameters": {  # vLLM's class asks for the fields of YaRN, which every checkpoint has
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "attention_bias": True,
        **_LOCAL_EXPERTS,
    },
}
MIXTURES = tuple(family for family, own in FAMILIES.items() if any("experts" in name for name in own))
STACKED = ("granitemoe", "granitemoeshared", "gpt_oss")
"""Mixtures that hold all experts of a layer in one tensor: no format of theirs has codes for experts."""
LATENT = ("glm4_moe_lite", "deepseek_v2", "deepseek_v3")
"""Families whose rows of latents end within a block, so that no `fp8` checkpoint holds them."""
ALL_FORMATS = ("llama", "mistral", "qwen2", "qwen3")
"""The families that are written in every format; the others in the first of four bits, of FP8 and of GPTQ."""
