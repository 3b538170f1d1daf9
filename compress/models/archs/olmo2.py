"""OLMo 2 (arXiv 2501.00656): the norms of a layer follow its halves, and those of q and k span all heads."""

from compress.models.family import FAMILIES, Family
from compress.models.module_names import POST_NORM_MODULES

FAMILIES.add(
    "olmo2",
    Family(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        facts=lambda config: {"block": "post", "whole_qk_norm": True},
        layer_modules=POST_NORM_MODULES,
        known_fields=frozenset({"attention_bias"}),
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 2048,
        },
    ),
)
