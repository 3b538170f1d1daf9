"""Qwen1.5-MoE and Qwen2-57B-A14B (arXiv 2407.10671): Qwen2 with experts, one of which every token goes
through, with a gate of its own."""

from compress.models.family import FAMILIES, Family
from compress.models.layer_types import one_window, windows_by_layer_type
from compress.models.mixture import AS_IN_MEMORY, Mixture, apart, sparse_by_step, state_steps
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields


def _windows(config: Fields, num_layers: int) -> list[int | None]:
    """Return the windows as the layers' types state them, or else those of every other layer before
    `max_window_layers`."""
    if config.has("layer_types") or not config.flag("use_sliding_window"):
        return windows_by_layer_type(config, num_layers)
    stop = config.integer("max_window_layers", 0, 1 << 31)
    return [one_window(config) if idx % 2 == 0 and idx < stop else None for idx in range(num_layers)]


SHARED_EXPERT_MODULES = {
    "moe.router": "mlp.gate",
    "moe.shared.gate": "mlp.shared_expert.gate_proj",
    "moe.shared.up": "mlp.shared_expert.up_proj",
    "moe.shared.down": "mlp.shared_expert.down_proj",
    "moe.shared_gate": "mlp.shared_expert_gate",
}
QWEN2_MIXTURE = Mixture(
    {
        "num_experts": "num_experts",
        "top_k": "num_experts_per_tok",
        "expert_size": "moe_intermediate_size",
        "shared_size": "shared_expert_intermediate_size",
        "renormalize": "norm_topk_prob",
    },
    facts={"shared_gate": True},
    is_sparse=sparse_by_step,
    state_sparse=state_steps,
)
MIXTURE_FIELDS = frozenset({*QWEN2_MIXTURE.fields.values(), "decoder_sparse_step", "mlp_only_layers"})

FAMILIES.add(
    "qwen2_moe",
    Family(
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        qkv_bias="qkv_bias",
        windows=_windows,
        mixture=QWEN2_MIXTURE,
        layer_modules={**LAYER_MODULES, **SHARED_EXPERT_MODULES},
        expert_layouts=(apart("mlp.experts"), AS_IN_MEMORY),
        known_fields=MIXTURE_FIELDS
        | {"qkv_bias", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"},
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "num_key_value_heads": 16,
            "intermediate_size": 5632,
            "max_position_embeddings": 32768,
            "qkv_bias": True,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
        },
    ),
)
