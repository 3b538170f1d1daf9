"""OLMoE 1B-7B (arXiv 2409.02060): norms over all heads of q and k, 64 experts, weights as the softmax gives
them. A model that clips q, k and v (`clip_qkv`) is refused."""

from compress.models.family import FAMILIES, Family
from compress.models.mixture import AS_IN_MEMORY, Mixture, apart
from compress.models.module_names import LAYER_MODULES

OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    facts=lambda config: {"whole_qk_norm": True},
    mixture=Mixture(
        {
            "num_experts": "num_experts",
            "top_k": "num_experts_per_tok",
            "expert_size": "intermediate_size",
            "renormalize": "norm_topk_prob",
        }
    ),
    layer_modules={**LAYER_MODULES, "moe.router": "mlp.gate"},
    expert_layouts=(apart("mlp.experts"), AS_IN_MEMORY),
    known_fields=frozenset({"attention_bias", "num_experts", "num_experts_per_tok", "norm_topk_prob"}),
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "intermediate_size": 2048,
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
)

FAMILIES.add("olmoe", OLMOE)
