"""Tiny models of families with recurrent layers or convolutions, and with both in one layer."""

from typing import Any

from tests.support.tiny_cases.facts import DELTA_NET, EXPERTS, NEMOTRON, NGRAMS, OTHER_DELTA_NET, ROUTED

# A delta net of OLMo Hybrid, whose betas are doubled, before attention.
TWO_BLOCKS = {
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_state": 12,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
OTHER_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_d_conv": 3,
    "mamba_expand": 1,
    "mamba_conv_bias": False,
    "mamba_chunk_size": 16,
}
FALCON_FACTORS = {
    "embedding_multiplier": 5.7,
    "lm_head_multiplier": 0.3,
    "key_multiplier": 0.4,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.35, 0.6, 0.8, 0.5, 0.7],
    "mlp_multipliers": [0.9, 0.6],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            "shared_intermediate_size": 80,
            "position_embedding_type": "rope",
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoehybrid-no-positions": (
        "granitemoehybrid",
        {"shared_intermediate_size": 56, "attention_multiplier": 0.4, "attention_bias": True},
    ),
    "granitemoehybrid-h": (
        "granitemoehybrid",
        {
            **MAMBA,
            "layer_types": ["mamba", "attention", "mamba"],
            "shared_intermediate_size": 80,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoehybrid-h-experts": (
        "granitemoehybrid",
        {
            **OTHER_MAMBA,
            "layer_types": ["mamba", "mamba", "attention"],
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
            "shared_intermediate_size": 56,
            "attention_multiplier": 0.3,
        },
    ),
    "bamba": ("bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "bamba-groups-biases": (
        "bamba",
        {**OTHER_MAMBA, "attn_layer_indices": [2], "attention_bias": True, "mlp_bias": True, "head_dim": 12},
    ),
    "jamba": (
        "jamba",
        {
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 0,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "mamba_d_state": 12,
        },
    ),
    "jamba-dense-tied": (
        "jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 0,
            "num_experts": 1,
            "mamba_d_state": 16,
            "mamba_d_conv": 3,
            "mamba_expand": 1,
            "mamba_dt_rank": 5,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "falcon_h1": ("falcon_h1", {**MAMBA, **FALCON_FACTORS, "mamba_d_ssm": 48, "mamba_d_head": 12}),
    "falcon_h1-norm-biases": (
        "falcon_h1",
        {
            **OTHER_MAMBA,
            "mamba_d_ssm": None,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 12,
            "key_multiplier": 0.4,
            "attention_out_multiplier": 0.9,
            "mlp_multipliers": [0.9, 0.6],
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {**NEMOTRON, "layers_block_type": ["full_attention", "mlp", "linear_attention"]},
    ),
    "nemotron_h-biases": (
        "nemotron_h",
        {
            **NEMOTRON,
            "n_groups": 1,
            "conv_kernel": 3,
            "use_conv_bias": False,
            "layers_block_type": ["linear_attention", "full_attention", "mlp"],
            "mlp_bias": True,
        },
    ),
    "nemotron_h-experts": (
        "nemotron_h",
        {
            **NEMOTRON,
            **{name: value for name, value in ROUTED.items() if name != "partial_rotary_factor"},
            "layers_block_type": ["moe", "full_attention", "linear_attention"],
            "moe_shared_expert_intermediate_size": 72,
            "routed_scaling_factor": 2.5,
        },
    ),
    "nemotron_h-latents": (
        "nemotron_h",
        {
            **NEMOTRON,
            **{name: value for name, value in ROUTED.items() if name != "partial_rotary_factor"},
            "layers_block_type": ["moe", "full_attention", "linear_attention"],
            "moe_shared_expert_intermediate_size": 80,
            "moe_latent_size": 24,
            "routed_scaling_factor": 5.0,
        },
    ),
    "nemotron_h-latents-biases": (
        "nemotron_h",
        {
            **NEMOTRON,
            **{name: value for name, value in ROUTED.items() if name != "partial_rotary_factor"},
            "layers_block_type": ["full_attention", "moe", "linear_attention"],
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 80,
            "mlp_bias": True,
        },
    ),
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "lfm2-adjusted-width-untied": (
        "lfm2",
        {
            "layer_types": ["full_attention", "conv", "conv"],
            "block_multiple_of": 8,
            "conv_L_cache": 4,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {**EXPERTS, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    ),
    "lfm2_moe-without-bias": (
        "lfm2_moe",
        {
            **EXPERTS,
            "layer_types": ["conv", "conv", "full_attention"],
            "num_dense_layers": 2,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.7,
            "tie_word_embeddings": False,
        },
    ),
    "lfm3": (
        "lfm3",
        {
            "layer_types": ["conv", "full_attention", "sliding_attention"],
            "head_dim": 8,
            "sliding_window": 5,
        },
    ),
    "lfm3-biases-untied": (
        "lfm3",
        {
            "layer_types": ["sliding_attention", "conv", "full_attention"],
            "head_dim": 16,
            "sliding_window": 4,
            "conv_L_cache": 3,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "lfm3-without-norms-or-gates": (
        "lfm3",
        {
            "layer_types": ["full_attention", "conv", "conv"],
            "head_dim": 8,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
        },
    ),
    "qwen3_next": ("qwen3_next", {**EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 56}),
    "qwen3_next-heads-above-a-block": (
        "qwen3_next",
        {**EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 56, "head_dim": 256},
    ),
    "qwen3_next-some-dense": (
        "qwen3_next",
        {
            **EXPERTS,
            **OTHER_DELTA_NET,
            "shared_expert_intermediate_size": 40,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_5_text": ("qwen3_5_text", DELTA_NET),
    "qwen3_5_text-tied": ("qwen3_5_text", OTHER_DELTA_NET),
    "qwen3_5_text-heads-above-a-block": ("qwen3_5_text", {**DELTA_NET, "head_dim": 256}),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        {**EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 56},
    ),
    "qwen4_exp_text": ("qwen4_exp_text", NGRAMS),
    "qwen4_exp_text-tied": (
        "qwen4_exp_text",
        {
            **EXPERTS,
            **OTHER_DELTA_NET,
            "norm_topk_prob": False,
            "ple_layer_ids": [3],
            "ngram_size": 4,
            "heads_per_ngram": 1,
            "ple_embed_dim": 18,
            "ple_conv_kernel_size": 3,
            "split_ngram_parts": 1,
            "seed": 7,
            "eos_token_id": [5, 2],
        },
    ),
    "qwen4_exp_text-without-ngrams": (
        "qwen4_exp_text",
        {**EXPERTS, **DELTA_NET, "indexer_compress_ratio": 8},
    ),
    "olmo_hybrid": ("olmo_hybrid", {**TWO_BLOCKS, "rope_parameters": {"rope_theta": None}}),
    "olmo_hybrid-rope-biases-tied": (
        "olmo_hybrid",
        {
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "linear_num_value_heads": 6,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "rms_norm_eps": 1e-4,
        },
    ),
    "minimax": (
        "minimax",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
            "block_size": 8,
            "head_dim": 12,
            "full_attn_alpha_factor": 3.5,
            "full_attn_beta_factor": 1.5,
            "linear_attn_alpha_factor": 2.5,
            "linear_attn_beta_factor": 1.25,
            "mlp_alpha_factor": 3.0,
            "mlp_beta_factor": 0.75,
        },
    ),
    "minimax-alternating-tied": (
        "minimax",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size": 56,
            "block_size": 16,
            "mlp_alpha_factor": 1.5,
            "tie_word_embeddings": True,
        },
    ),
}
