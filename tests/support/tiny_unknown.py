"""Tiny random models of `transformers` that the decoder does not support, to be quantized by tensor name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FFN = {"intermediate_size": 256}
TEXT = {**SIZES, **FFN, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
EXPERTS = {**ROUTED, "num_experts": 8, "shared_expert_intermediate_size": 128}
DEEPSEEK = {
    **ROUTED,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}


def _model(name: str, **facts: Any) -> Callable[[], Any]:
    def build() -> Any:
        kind = getattr(transformers, name)
        return kind(kind.config_class(**facts))

    return build


MODELS: dict[str, Callable[[], Any]] = {
    "gpt_neox": _model("GPTNeoXForCausalLM", **SIZES, **FFN, max_position_embeddings=128),
    "bloom": _model("BloomForCausalLM", vocab_size=384, hidden_size=128, n_layer=2, n_head=4),
    "diffllama": _model("DiffLlamaForCausalLM", **SIZES, **FFN),
    "phi": _model("PhiForCausalLM", **SIZES, **FFN),
    "starcoder2": _model("Starcoder2ForCausalLM", **SIZES, **FFN, num_key_value_heads=2),
    "opt": _model("OPTForCausalLM", **SIZES, ffn_dim=256, word_embed_proj_dim=64),
    "mamba": _model("MambaForCausalLM", vocab_size=384, hidden_size=128, num_hidden_layers=2, state_size=16),
    "t5": _model(
        "T5ForConditionalGeneration",
        vocab_size=384,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
    ),
    "bert": _model("BertForMaskedLM", **SIZES, **FFN),
    "bert-classifier": _model("BertForSequenceClassification", **SIZES, **FFN, num_labels=48),
    "deepseek_v3": _model("DeepseekV3ForCausalLM", **TEXT | LATENT | DEEPSEEK),
    "glm4_moe_lite": _model("Glm4MoeLiteForCausalLM", **TEXT | LATENT | DEEPSEEK),
    "qwen3_next": _model("Qwen3NextForCausalLM", **TEXT | DELTA | EXPERTS),
    "qwen3_5": _model("Qwen3_5ForCausalLM", **TEXT | DELTA),
    "qwen3_5_moe": _model("Qwen3_5MoeForCausalLM", **TEXT | DELTA | EXPERTS),
    "qwen3_5_moe-stacked": _model("Qwen3_5MoeForCausalLM", **TEXT | DELTA | EXPERTS),
    "nemotron_h": _model(
        "NemotronHForCausalLM",
        **TEXT | DEEPSEEK | {"num_hidden_layers": 4},
        layers_block_type=["mamba", "moe", "attention", "moe"],
        mamba_num_heads=4,
        mamba_head_dim=32,
        ssm_state_size=32,
        n_groups=2,
        head_dim=32,
        moe_shared_expert_intermediate_size=128,
    ),
    "lfm2": _model("Lfm2ForCausalLM", **TEXT, layer_types=["conv", "full_attention"]),
    "falcon_h1": _model(
        "FalconH1ForCausalLM",
        **TEXT,
        mamba_d_ssm=128,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=32,
        mamba_n_groups=1,
        head_dim=32,
    ),
    "gemma4-e": _model(
        "Gemma4ForCausalLM",
        **TEXT | {"num_hidden_layers": 4},
        head_dim=32,
        global_head_dim=64,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=384,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
}
KEPT_DENSE = {
    "mamba": {"lm_head", "dt_proj"},
    "bert": {"cls.predictions.decoder", "cls.predictions.transform.dense"},
    "bert-classifier": {"classifier"},
    "qwen3_next": {"lm_head", "in_proj_ba", "shared_expert_gate"},
    "qwen3_5": {"lm_head", "in_proj_a", "in_proj_b"},
    "qwen3_5_moe": {"lm_head", "in_proj_a", "in_proj_b", "shared_expert_gate"},
    "qwen3_5_moe-stacked": {"lm_head", "in_proj_a", "in_proj_b", "shared_expert_gate"},
    "lfm2": {"lm_head", "conv.in_proj", "conv.out_proj"},
    "gemma4-e": {"lm_head", "per_layer_input_gate"},
}
"""What the names of linears end in that stay dense, where it is more than the head. The head of GPT-NeoX is
`embed_out` on disk."""
IN_MEMORY = {"nemotron_h": ("backbone.", "model.")}
"""Prefixes of names on disk and in `transformers`, where the two differ."""


def build_unknown(name: str, *, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a model, in eval mode; weights are large enough that its outputs depend on all of them."""
    torch.manual_seed(0)
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 2 or ".experts." in parameter_name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model.to(dtype).eval()


def save_unknown(directory: Path, name: str, **how: Any) -> Any:
    """Save such a model as `transformers` does, and return it."""
    shard = {"max_shard_size": how.pop("max_shard_size")} if "max_shard_size" in how else {}
    model = build_unknown(name, **how)
    # As its class has them in memory: the hub has Qwen3.5's experts in stacks, `transformers` writes each.
    in_stacks = {"save_original_format": False} if name.endswith("-stacked") else {}
    model.save_pretrained(directory, **shard, **in_stacks)
    return model
