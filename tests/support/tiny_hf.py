"""Tiny random `transformers` models of every family, with the variants in which configs of a family differ.

Norms and biases are perturbed, so that none of them can be dropped or swapped unseen; weights are large
enough that attention is not uniform.
"""

from pathlib import Path
from typing import Any

import torch
import transformers

CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "mixtral": transformers.MixtralConfig,
    "qwen2_moe": transformers.Qwen2MoeConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "olmoe": transformers.OlmoeConfig,
    "glm4_moe": transformers.Glm4MoeConfig,
    "gpt_oss": transformers.GptOssConfig,
    "granitemoe": transformers.GraniteMoeConfig,
}
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
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
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
MIXED = ["full_attention", "sliding_attention", "full_attention"]

LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
ROUTED = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
}

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
    "mixtral": ("mixtral", LOCAL_EXPERTS),
    "mixtral-window": ("mixtral", {**LOCAL_EXPERTS, "num_experts_per_tok": 3, "sliding_window": 5}),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, "head_dim": 8, "norm_topk_prob": True}),
    "qwen3-moe-some-dense": (
        "qwen3_moe",
        {**EXPERTS, "head_dim": 8, "decoder_sparse_step": 2, "attention_bias": True},
    ),
    "qwen3-moe-listed-dense": (
        "qwen3_moe",
        {**EXPERTS, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 5},
    ),
    "qwen2-moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 56}),
    "qwen2-moe-some-dense": (
        "qwen2_moe",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 2,
        },
    ),
    "olmoe": ("olmoe", EXPERTS),
    "olmoe-biases": ("olmoe", {**EXPERTS, "norm_topk_prob": True, "attention_bias": True}),
    "glm4-moe": ("glm4_moe", {**ROUTED, "routed_scaling_factor": 1.7}),
    "glm4-moe-groups": (
        "glm4_moe",
        {
            **ROUTED,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 16,
            "norm_topk_prob": False,
        },
    ),
    "gpt-oss": ("gpt_oss", {**LOCAL_EXPERTS, "head_dim": 8, "sliding_window": 5}),
    "gpt-oss-other-layers": (
        "gpt_oss",
        {**LOCAL_EXPERTS, "head_dim": 16, "sliding_window": 4, "layer_types": MIXED, "rope_parameters": YARN},
    ),
    "granitemoe": ("granitemoe", {**LOCAL_EXPERTS, "attention_multiplier": 0.4}),
    "granitemoe-multipliers": (
        "granitemoe",
        {
            **LOCAL_EXPERTS,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}


def build(family: str, changes: dict[str, Any], *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A model of that family on the CPU, in eval mode."""
    config = CONFIGS[family](**{**SMALL, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1 or (parameter.dim() == 2 and name.endswith("_bias")):
                parameter.copy_(parameter + 0.3 * noise)
            else:
                parameter.copy_(noise * parameter.shape[1 if parameter.dim() == 2 else -1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model.to(dtype).eval()


def saved(directory: Path, family: str, changes: dict[str, Any], **how: Any) -> Any:
    """Save such a model as `transformers` does, and return it."""
    shard = {"max_shard_size": how.pop("max_shard_size")} if "max_shard_size" in how else {}
    model = build(family, changes, **how)
    model.save_pretrained(directory, **shard)
    return model


def tokens(num_sequences: int, length: int) -> torch.Tensor:
    return torch.randint(
        SMALL["vocab_size"], (num_sequences, length), generator=torch.Generator().manual_seed(5)
    )
