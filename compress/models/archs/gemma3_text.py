"""Gemma 3 (arXiv 2503.19786), the text model: Gemma 2 with norms of q and k in place of the caps, five layers
with a window to one without, and a rope of their own for each."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.layer_types import every_nth_full, rope_by_layer_type, windows_by_layer_type
from compress.models.limits import MAX_LAYERS, MAX_SIZE, SCALES, THETAS
from compress.models.module_names import LAYER_MODULES, SANDWICH_NORMS
from compress.untrusted.fields import Fields


def _facts(config: Fields) -> dict[str, Any]:
    scalar = config.number("query_pre_attn_scalar", 1e-3, SCALES[1])
    name = "final_logit_softcapping"
    return {
        "norm_offset": 1.0,
        "block": "sandwich",
        "embed_scale": config.integer("hidden_size", 1, MAX_SIZE) ** 0.5,
        "attn_scale": None if scalar == config.integer("head_dim", 1, MAX_SIZE) else scalar**-0.5,
        "logit_softcap": config.number(name, 1e-3, SCALES[1]) if config.has(name) else None,
    }


def _implied(config: Fields) -> dict[str, Any]:
    period = config.integer("sliding_window_pattern", 1, MAX_LAYERS, default=6)
    full_theta = config.number("rope_theta", *THETAS, default=1e6)
    sliding_theta = config.number("rope_local_base_freq", *THETAS, default=1e4)
    return every_nth_full(config, period) | rope_by_layer_type(config, full_theta, sliding_theta)


GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    heads_divide_hidden=True,
    windows=windows_by_layer_type,
    facts=_facts,
    implied=_implied,
    spelled={"hidden_act": "hidden_activation"},
    layer_modules={**LAYER_MODULES, **SANDWICH_NORMS},
    known_fields=frozenset(
        {
            "attention_bias",
            "sliding_window",
            "sliding_window_pattern",
            "_sliding_window_pattern",
            "layer_types",
            "rope_local_base_freq",
            "query_pre_attn_scalar",
            "final_logit_softcapping",
        }
    ),
    # `transformers` reads the cap of attention scores and never applies it.
    fixed_fields={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "num_hidden_layers": 26,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
    },
)

FAMILIES.add("gemma3_text", GEMMA3_TEXT)
