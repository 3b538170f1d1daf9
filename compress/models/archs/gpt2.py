"""GPT-2 (OpenAI, 2019) and DialoGPT: learned positions, LayerNorm with a bias, FFNs without gates, whose
activation is gelu, and biases of all linears. On disk matrices are [I, O], and those of queries, keys and
values are one tensor. Models whose attention scores have a factor for each layer are refused."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.layer_types import no_layer
from compress.models.limits import MAX_SIZE
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

GPT2_SIZES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
"""Standard names of the sizes of a model -> those of GPT-2."""
OTHER_HEADS = (
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
)
"""Fields of models with other heads than that of a language model."""
DROPOUT = ("attn_pdrop", "embd_pdrop", "resid_pdrop")


def gpt2_facts(config: Fields) -> dict[str, Any]:
    """Return the norms, the offset of positions and the factor of attention scores."""
    unscaled = {} if config.flag("scale_attn_weights") else {"attn_scale": 1.0}
    return {"norm": "layer", "norm_bias": True, "position_offset": 0, **unscaled}


def ffn_size(config: Fields) -> int:
    """Return the width of the FFN: as stated, or four times that of the hidden states."""
    return config.integer("n_inner", 1, MAX_SIZE, default=4 * config.integer("hidden_size", 1, MAX_SIZE))


def _implied(config: Fields) -> dict[str, Any]:
    """Return as many heads of keys and values as of queries, whatever is stated, and the width of the FFN."""
    return {
        "num_key_value_heads": config.integer("num_attention_heads", 1, MAX_SIZE),
        "n_inner": ffn_size(config),
    }


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    qkv_bias=True,
    o_bias=True,
    ffn_bias=True,
    gated=False,
    heads_divide_hidden=True,
    heads_span_hidden=True,
    rotated_layers=no_layer,
    facts=gpt2_facts,
    implied=_implied,
    spelled={**GPT2_SIZES, "hidden_act": "activation_function", "rms_norm_eps": "layer_norm_epsilon"},
    dense_size="n_inner",
    transposed=frozenset({"attn.q", "attn.k", "attn.v", "attn.o", "ffn.up", "ffn.down"}),
    outer_modules={
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    layer_prefix="transformer.h.",
    layer_modules={
        **{name: disk for name, disk in LAYER_MODULES.items() if name != "ffn.gate"},
        "attn_norm": "ln_1",
        "attn": "attn",
        **dict.fromkeys(("attn.q", "attn.k", "attn.v"), "attn.c_attn"),
        "attn.o": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn.up": "mlp.c_fc",
        "ffn.down": "mlp.c_proj",
    },
    other_prefixes={f"{name}.": f"transformer.{name}." for name in ("wte", "wpe", "h", "ln_f")},
    ignored_tensors=r"\.attn\.(masked_)?bias$",  # of masks
    known_fields=frozenset(
        {
            "n_inner",
            "layer_norm_epsilon",
            "scale_attn_weights",
            "reorder_and_upcast_attn",  # the order and the dtype in which scores are rounded
            *OTHER_HEADS,
            *DROPOUT,
        }
    ),
    fixed_fields={"add_cross_attention": False, "scale_attn_by_inverse_layer_idx": False},
    defaults={
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "layer_norm_epsilon": 1e-5,
        "rope_theta": 10000.0,
        "n_positions": 1024,
        "scale_attn_weights": True,
    },
)

FAMILIES.add("gpt2", GPT2)
