"""Facts that the tiny models of several kinds of families have."""

LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # one of the four frequencies of a head of 8 is kept, one interpolated, two divided
    "original_max_position_embeddings": 100,
    "rope_theta": 10000.0,
}
STRETCHED = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 100.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
# Six dimensions of a head of 8 rotate; sequences of more than 16 tokens take the long factors.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.5, 2.5],
    "long_factor": [1.2, 3.0, 7.0],
}
HALF_ROTATED = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
GROWING_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 5,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
MIXED = ["full_attention", "sliding_attention", "full_attention"]
LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
INKLING = {
    "head_dim": 8,
    "swa_head_dim": 8,
    "swa_num_attention_heads": 6,
    "swa_num_key_value_heads": 3,
    "sliding_window_size": 5,
    "d_rel": 4,
    "rel_extent": 9,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "logits_mup_width_multiplier": 2.0,
    "log_scaling_n_floor": 6,
    "log_scaling_alpha": 0.5,
}
# Chunks end within a prompt and between two steps of a decode; queries without a rope grow at 4, 8, ...
CHUNKED = {
    "head_dim": 8,
    "attention_chunk_size": 5,
    "floor_scale": 4,
    "attn_scale": 0.4,
    "num_local_experts": 6,
    "intermediate_size": 40,
    "intermediate_size_mlp": 72,
}
ROUTED = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
}
# Two value heads for each key head, values wider than keys, and attention in every other layer.
DELTA_NET = {
    "head_dim": 8,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
# Qwen4: embeddings of n-grams in both layers with a delta net, and an indexer that chooses all blocks.
NGRAMS = {
    **EXPERTS,
    **DELTA_NET,
    "shared_expert_intermediate_size": 56,
    "hc_count": 3,
    "indexer_budget": 36,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "ple_layer_ids": [1, 3],
    "heads_per_ngram": 2,
    "split_ngram_parts": 3,
    "make_ngram_vocab_size_divisible_by": 16,
}
# One key head, a short convolution, and attention in the first layer.
OTHER_DELTA_NET = {
    "head_dim": 16,
    "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    "linear_num_value_heads": 3,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}
# Values narrower than keys, latents narrower and wider than a head.
DENSE_LATENTS = {
    "q_lora_rank": 28,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "num_key_value_heads": 6,
}
LATENTS = {
    **DENSE_LATENTS,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
}
GLM53 = {
    **LATENTS,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 0,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "linear_num_heads": 3,
    "linear_head_dim": 8,
    "hc_mult": 3,
    "hc_eps": 1e-3,
    "hc_sinkhorn_iters": 4,
    "swiglu_limit": 0.5,
    "index_topk": 32,
    "index_n_heads": 4,
    "index_head_dim": 8,
    "index_kpool": 4,
}
"""Delta nets whose decays are bounded, latent attention that chooses pools of keys, and streams."""
INDEXERS = {"index_topk": 32, "index_n_heads": 4, "index_head_dim": 8}
"""Of as many keys as the tests have positions."""
DOTS3 = {
    **LATENTS,
    **INDEXERS,
    "qk_rope_head_dim": 8,
    "head_dim": 16,
    "sliding_window": 5,
    "shared_experts_intermediate_size": 24,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 20,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 18,
    "swa_qk_nope_head_dim": 12,
    "swa_v_head_dim": 10,
}
OF_BLOCKS = {
    **LOCAL_EXPERTS,
    "head_dim": 16,
    "rotary_dim": 8,
    "intermediate_size": 40,
    "dense_intermediate_size": 72,
    "shared_intermediate_size": 80,
    "routed_scaling_factor": 1.7,
    "rope_parameters": HALF_ROTATED,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "index_n_heads": 2,
    "index_head_dim": 24,
    "index_block_size": 8,
    "index_topk_blocks": 4,
}
"""Layers of MiniMax-M3 with indexers that choose all blocks of the tests."""
# Its class bounds the steps of time of prompts, and not those of decode.
NEMOTRON = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 20,
    "ssm_state_size": 12,
    "n_groups": 2,
    "chunk_size": 8,
    "head_dim": 12,
    "time_step_min": 1e-12,
}
ROPES_OF_COMPASS: dict[str, object] = {
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "logit_scale": 0.25,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "full_attention": None,
    },
}
