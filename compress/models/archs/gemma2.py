"""Gemma 2 (arXiv 2408.00118): Gemma with norms before and after each half of a layer, a sliding window in
every other layer, and soft caps of attention scores and logits."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.layer_types import every_nth_full, windows_by_layer_type
from compress.models.limits import MAX_SIZE, SCALES
from compress.models.module_names import LAYER_MODULES, SANDWICH_NORMS
from compress.untrusted.fields import Fields


def _facts(config: Fields) -> dict[str, Any]:
    def cap(name: str) -> float | None:
        return config.number(name, 1e-3, SCALES[1]) if config.has(name) else None

    scalar = config.number("query_pre_attn_scalar", 1e-3, SCALES[1])
    return {
        "norm_offset": 1.0,
        "block": "sandwich",
        "embed_scale": config.integer("hidden_size", 1, MAX_SIZE) ** 0.5,
        "attn_scale": None if scalar == config.integer("head_dim", 1, MAX_SIZE) else scalar**-0.5,
        "attn_softcap": cap("attn_logit_softcapping"),
        "logit_softcap": cap("final_logit_softcapping"),
    }


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    heads_divide_hidden=True,
    windows=windows_by_layer_type,
    facts=_facts,
    implied=lambda config: every_nth_full(config, 2),
    spelled={"hidden_act": "hidden_activation"},
    layer_modules={**LAYER_MODULES, **SANDWICH_NORMS},
    known_fields=frozenset(
        {
            "attention_bias",
            "sliding_window",
            "layer_types",
            "query_pre_attn_scalar",
            "attn_logit_softcapping",
            "final_logit_softcapping",
        }
    ),
    fixed_fields={"use_bidirectional_attention": False},
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)

FAMILIES.add("gemma2", GEMMA2)
