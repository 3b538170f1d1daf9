"""FlexOlmo (Ai2, arXiv 2507.07024): OLMo 2 with experts in every layer, each trained on data of its own;
weights as the softmax gives them."""

from dataclasses import replace

from compress.models.archs.olmoe import OLMOE
from compress.models.family import FAMILIES
from compress.models.module_names import POST_NORM_MODULES

FAMILIES.add(
    "flex_olmo",
    replace(
        OLMOE,
        model_type="flex_olmo",
        architecture="FlexOlmoForCausalLM",
        facts=lambda config: {"block": "post", "whole_qk_norm": True},
        layer_modules={**POST_NORM_MODULES, "moe.router": "mlp.gate"},
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "rope_theta": 500000.0,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "num_experts": 7,
            "num_experts_per_tok": 5,
            "norm_topk_prob": False,
        },
    ),
)
