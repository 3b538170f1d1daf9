"""Apertus (Swiss AI Initiative, arXiv 2509.14233): Llama with norms of each head of q and k, and an FFN
without gates, whose activation xIELU has numbers of its own in each layer."""

from compress.models.family import FAMILIES, Family
from compress.models.module_names import LAYER_MODULES
from compress.models.xielu import PARAMETERS

FAMILIES.add(
    "apertus",
    Family(
        model_type="apertus",
        architecture="ApertusForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        gated=False,
        layer_modules={
            **LAYER_MODULES,
            "attn_norm": "attention_layernorm",
            "ffn_norm": "feedforward_layernorm",
            **{f"ffn.{name}": f"mlp.act_fn.{name}" for name in PARAMETERS},
        },
        known_fields=frozenset({"attention_bias", "hidden_dropout"}),  # dropout is for training only
        fixed_fields={"mlp_bias": False, "post_norm": False, "qk_norm": True},
        defaults={
            "hidden_act": "xielu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 65536,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 12000000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
    ),
)
