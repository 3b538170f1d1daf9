"""Qwen3 mixtures of experts (arXiv 2505.09388): Qwen3's attention, 128 small experts, no shared one."""

from compress.models.family import FAMILIES, Family
from compress.models.layer_types import one_window
from compress.models.mixture import AS_IN_MEMORY, Mixture, apart, sparse_by_step, state_steps
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields


def _same_window(config: Fields, num_layers: int) -> list[int | None]:
    """Return the window of every layer: unlike the dense models, all have it when it is switched on."""
    on = config.flag("use_sliding_window", default=False)
    return [one_window(config) if on else None] * num_layers


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    windows=_same_window,
    mixture=Mixture(
        {
            "num_experts": "num_experts",
            "top_k": "num_experts_per_tok",
            "expert_size": "moe_intermediate_size",
            "renormalize": "norm_topk_prob",
        },
        is_sparse=sparse_by_step,
        state_sparse=state_steps,
    ),
    layer_modules={**LAYER_MODULES, "moe.router": "mlp.gate"},
    expert_layouts=(apart("mlp.experts"), AS_IN_MEMORY),
    aliases={"num_experts": "num_local_experts"},
    known_fields=frozenset(
        {
            "attention_bias",
            "sliding_window",
            "use_sliding_window",
            "max_window_layers",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "norm_topk_prob",
            "decoder_sparse_step",
            "mlp_only_layers",
        }
    ),
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
)

FAMILIES.add("qwen3_moe", QWEN3_MOE)
