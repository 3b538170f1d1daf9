"""Tiny models of dense families."""

from typing import Any

from tests.support.tiny_cases.facts import (
    GROWING_YARN,
    HALF_ROTATED,
    LINEAR,
    LLAMA3,
    LONGROPE,
    MIXED,
    ROPES_OF_COMPASS,
    STRETCHED,
    YARN,
)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("llama", {"rms_norm_eps": 1e-5}),
    "llama-mha-default-rope": (
        "llama",
        {"num_key_value_heads": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "llama-all-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 16}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-exact-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-swish": ("llama", {"hidden_act": "swish"}),
    "llama-gelu-new": ("llama", {"hidden_act": "gelu_new"}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn-rope": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": (
        "llama",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}},
    ),
    "llama-yarn-stated": (
        "llama",
        {"rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0}},
    ),
    "mistral-window": ("mistral", {"sliding_window": 5}),
    "mistral-no-window": ("mistral", {"sliding_window": None, "head_dim": 10}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-upper-windows": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
    ),
    "qwen2-layer-types": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "layer_types": MIXED}),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "qwen3-biases": ("qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-layer-types-yarn": (
        "qwen3",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": MIXED,
            "rope_parameters": YARN,
        },
    ),
    "phi3": ("phi3", {"num_key_value_heads": 6}),
    "phi3-window-gqa": ("phi3", {"sliding_window": 5}),
    "phi3-partial-tied": (
        "phi3",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "phi3-partial-heads-above-a-block": (
        "phi3",
        {
            "hidden_size": 576,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
    "phi3-longrope-short": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    ),
    "phi3-longrope-long": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
    ),
    "gemma": ("gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma-one-kv-head": ("gemma", {"head_dim": 8, "num_key_value_heads": 1, "attention_bias": True}),
    "gemma2": (
        "gemma2",
        {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    ),
    "gemma2-narrow-caps": (
        "gemma2",
        {
            "head_dim": 8,
            "sliding_window": 4,
            "query_pre_attn_scalar": 8,
            "layer_types": MIXED,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2-no-caps": (
        "gemma2",
        {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 5, "sliding_window_pattern": 2, "tie_word_embeddings": True},
    ),
    "gemma3-scaled-rope": (
        "gemma3_text",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "num_key_value_heads": 1,
            "sliding_window": 4,
            "layer_types": MIXED,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma3n": ("gemma3n_text", {"head_dim": 8, "sliding_window": 5, "tie_word_embeddings": True}),
    "gemma3n-slices": (
        "gemma3n_text",
        {
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 61,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 3,
            "intermediate_size": [80, 64, 96, 80, 96, 64],
            "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.8, 0.0],
            "altup_num_inputs": 3,
            "laurel_rank": 4,
            "head_dim": 12,
            "attention_bias": True,
            "sliding_window": 4,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
            ],
            "final_logit_softcapping": 20.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
            },
        },
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 8.0,
        },
    ),
    "granite-tied-biases": (
        "granite",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "attention_multiplier": 0.5,
            "logits_scaling": 3.0,
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "smollm3-windows-yarn": (
        "smollm3",
        {
            "no_rope_layers": [1, 0, 0],
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": MIXED,
            "rope_parameters": YARN,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-mha-biases": ("olmo2", {"num_key_value_heads": 6, "attention_bias": True}),
    "olmo3": ("olmo3", {"sliding_window": 5}),
    "olmo3-yarn-on-full": (
        "olmo3",
        {
            "sliding_window": 4,
            "layer_types": MIXED,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "glm": ("glm", {"head_dim": 8}),
    "glm-wide-heads-no-biases": (
        "glm",
        {
            "head_dim": 16,
            "attention_bias": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
    "glm4": ("glm4", {"head_dim": 8}),
    "glm4-whole-rotary-tied": (
        "glm4",
        {
            "head_dim": 8,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        },
    ),
    "ministral": ("ministral", {"sliding_window": 5}),
    "ministral-layer-types": ("ministral", {"sliding_window": 4, "layer_types": MIXED, "head_dim": 12}),
    "ministral3": ("ministral3", {"head_dim": 8, "rope_parameters": GROWING_YARN}),
    "ministral3-window": (
        "ministral3",
        {"head_dim": 16, "sliding_window": 6, "rope_parameters": {**GROWING_YARN, "mscale": 0.5}},
    ),
    "cohere": ("cohere", {"tie_word_embeddings": True}),
    "cohere-untied-biases": ("cohere", {"attention_bias": True, "logit_scale": 0.7}),
    "cohere-norms-of-heads": ("cohere", {"use_qk_norm": True, "attention_bias": True}),
    "cohere2": ("cohere2", {"sliding_window": 5, "layer_types": MIXED, "tie_word_embeddings": True}),
    "cohere2-biases": (
        "cohere2",
        {"sliding_window": 4, "sliding_window_pattern": 2, "attention_bias": True},
    ),
    "cohere_compass_text": ("cohere_compass_text", ROPES_OF_COMPASS),
    "cohere_compass_text-biases": (
        "cohere_compass_text",
        {
            "attention_bias": True,
            "num_key_value_heads": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0}
            },
        },
    ),
    "exaone4": ("exaone4", {"sliding_window": 5, "layer_types": MIXED}),
    "exaone4-no-window": (
        "exaone4",
        {
            "sliding_window": None,
            "layer_types": ["full_attention"] * 3,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
        },
    ),
    "ernie4_5": ("ernie4_5", {"head_dim": 8}),
    "seed_oss": ("seed_oss", {"head_dim": 8}),
    "seed_oss-other-biases": (
        "seed_oss",
        {
            "head_dim": 12,
            "num_key_value_heads": 1,
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "ernie4_5-biases": ("ernie4_5", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": True}),
    "cwm": ("cwm", {"head_dim": 8, "sliding_window": 5}),
    "cwm-layer-types": (
        "cwm",
        {
            "head_dim": 16,
            "sliding_window": 4,
            "layer_types": MIXED,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "vaultgemma": (
        "vaultgemma",
        {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    ),
    "vaultgemma-narrow-caps": (
        "vaultgemma",
        {
            "head_dim": 8,
            "sliding_window": 4,
            "query_pre_attn_scalar": 8,
            "layer_types": MIXED,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
        },
    ),
    "arcee": ("arcee", {"mlp_bias": True}),
    "nemotron": ("nemotron", {"rope_parameters": HALF_ROTATED}),
    "nemotron-biases": (
        "nemotron",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": HALF_ROTATED},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 5, "tie_word_embeddings": True}),
    "starcoder2-without-biases": (
        "starcoder2",
        {"use_bias": False, "hidden_act": "gelu", "num_key_value_heads": 1},
    ),
    "gpt_neox": ("gpt_neox", {"rope_parameters": HALF_ROTATED}),
    "gpt_neox-one-half-after-the-other": (
        "gpt_neox",
        {"use_parallel_residual": False, "hidden_act": "gelu_fast", "tie_word_embeddings": True},
    ),
    "gpt_neox-heads-above-a-block": (
        "gpt_neox",
        {
            "hidden_size": 576,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_hidden_layers": 2,
            "attention_bias": False,
        },
    ),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-halves-side-by-side": (
        "stablelm",
        {
            "use_parallel_residual": True,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
            "rope_parameters": HALF_ROTATED,
        },
    ),
    "jais2": ("jais2", {"head_dim": 12}),
    "jais2-tied-without-biases": (
        "jais2",
        {
            "attention_bias": False,
            "mlp_bias": False,
            "num_key_value_heads": 6,
            "tie_word_embeddings": True,
        },
    ),
    "apertus": ("apertus", {"rope_parameters": LLAMA3}),
    "apertus-tied-biases": (
        "apertus",
        {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "hyperclovax": (
        "hyperclovax",
        {
            "embedding_multiplier": 10.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.125,
        },
    ),
    "hyperclovax-without-post-norms-tied": (
        "hyperclovax",
        {
            "use_post_norm": False,
            "head_dim": 12,
            "residual_multiplier": 0.25,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "internlm3": ("internlm3", {"head_dim": 8}),
    "internlm3-biases": (
        "internlm3",
        {"head_dim": 12, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "iquestcoder": ("iquestcoder", {"head_dim": 8, "attention_bias": True, "rope_parameters": LLAMA3}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 8, "rope_parameters": STRETCHED}),
    "hunyuan_v1_dense-bias": (
        "hunyuan_v1_dense",
        {"head_dim": 16, "num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "granite_swa": ("granite_swa", {"sliding_window": 5, "attention_multiplier": 0.4}),
    "granite_swa-no-positions": (
        "granite_swa",
        {
            "sliding_window": 4,
            "layer_types": MIXED,
            "layer_rope_theta": [0, 500.0, 500],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "bitnet": ("bitnet", {"tie_word_embeddings": True}),
    "bitnet-biases-silu": (
        "bitnet",
        {"attention_bias": True, "hidden_act": "silu", "rope_parameters": LLAMA3},
    ),
    "nanochat": ("nanochat", {"rope_parameters": LLAMA3}),
    "nanochat-biases-tied": (
        "nanochat",
        {
            "num_key_value_heads": None,
            "head_dim": 12,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "final_logit_softcapping": None,
            "rms_norm_eps": 1e-4,
        },
    ),
    "nanochat-heads-above-a-block": (
        "nanochat",
        {
            "hidden_size": 512,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_hidden_layers": 2,
            "rope_parameters": LINEAR,
        },
    ),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 80}),
    "falcon-one-norm-biases": (
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
            "num_kv_heads": 3,
            "num_key_value_heads": 3,
            "bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-one-kv-head": (
        "falcon",
        {"num_key_value_heads": 1, "ffn_hidden_size": 80, "tie_word_embeddings": True},
    ),
    "falcon-all-heads-one-half-after-the-other": (
        "falcon",
        {
            "num_key_value_heads": 6,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            "layer_norm_epsilon": 1e-4,
            "rope_parameters": LINEAR,
        },
    ),
    "opt": ("opt", {"ffn_dim": 80, "tie_word_embeddings": True}),
    "opt-no-biases-gelu": (
        "opt",
        {
            "ffn_dim": 72,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "activation_function": "gelu",
        },
    ),
    "gpt2": ("gpt2", {"n_inner": 80, "tie_word_embeddings": True}),
    "gpt2-unscaled-apart": (
        "gpt2",
        {
            "n_inner": 72,
            "scale_attn_weights": False,
            "reorder_and_upcast_attn": True,
            "activation_function": "relu",
            "layer_norm_epsilon": 1e-4,
        },
    ),
    "gpt_bigcode": ("gpt_bigcode", {"n_inner": 80, "tie_word_embeddings": True}),
    "gpt_bigcode-all-heads-apart": (
        "gpt_bigcode",
        {
            "n_inner": 72,
            "multi_query": False,
            "num_key_value_heads": 6,
            "scale_attn_weights": False,
            "activation_function": "gelu",
            "layer_norm_epsilon": 1e-4,
        },
    ),
    "phi": ("phi", {"rope_parameters": HALF_ROTATED}),
    "phi-all-heads": (
        "phi",
        {
            "num_key_value_heads": None,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-4,
            "rope_parameters": LINEAR,
        },
    ),
    "phi-heads-above-a-block": (
        "phi",
        {
            "hidden_size": 576,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
        },
    ),
    "olmo": ("olmo", {}),
    "olmo-biases-tied": (
        "olmo",
        {
            "num_key_value_heads": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
        },
    ),
    "helium": ("helium", {}),
    "helium-biases": (
        "helium",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
}
