"""GPT-J (EleutherAI, 2021): attention and FFN side by side after one LayerNorm with a bias, FFNs without
gates, and a part of each head that rotates, in which neighbouring dimensions turn as a pair on disk. The
linears of the FFN and the head have biases, those of attention have none."""

from typing import Any

from compress.models.archs.gpt2 import DROPOUT, GPT2_SIZES, OTHER_HEADS, ffn_size
from compress.models.family import FAMILIES, Family
from compress.models.limits import MAX_SIZE
from compress.models.module_names import LAYER_MODULES
from compress.models.rope_config import part_that_rotates
from compress.untrusted.fields import Fields


def gptj_facts(config: Fields) -> dict[str, Any]:
    """Return the norms, the block, and the bias of the head."""
    return {"norm": "layer", "norm_bias": True, "block": "parallel", "head_bias": True}


def gptj_implied(config: Fields) -> dict[str, Any]:
    """Return as many heads of keys and values as of queries, the width of the FFN, and the part of a head
    that rotates."""
    num_heads = config.integer("num_attention_heads", 1, MAX_SIZE)
    head_dim = max(config.integer("hidden_size", 1, MAX_SIZE) // num_heads, 1)
    return {
        "num_key_value_heads": num_heads,
        "n_inner": ffn_size(config),
        "partial_rotary_factor": part_that_rotates(config, head_dim),
    }


GPTJ = Family(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    ffn_bias=True,
    gated=False,
    heads_divide_hidden=True,
    heads_span_hidden=True,
    interleaved_rotary=True,
    facts=gptj_facts,
    implied=gptj_implied,
    spelled={**GPT2_SIZES, "hidden_act": "activation_function", "rms_norm_eps": "layer_norm_epsilon"},
    dense_size="n_inner",
    outer_modules={"embed": "transformer.wte", "norm": "transformer.ln_f", "head": "lm_head"},
    layer_prefix="transformer.h.",
    layer_modules={
        **{
            name: disk.replace("self_attn.", "attn.")
            for name, disk in LAYER_MODULES.items()
            if name not in ("ffn_norm", "ffn.gate")
        },
        "attn_norm": "ln_1",
        "attn": "attn",
        "attn.o": "attn.out_proj",
        "ffn.up": "mlp.fc_in",
        "ffn.down": "mlp.fc_out",
    },
    other_prefixes={f"{name}.": f"transformer.{name}." for name in ("wte", "h", "ln_f")},
    ignored_tensors=r"\.attn\.(masked_)?bias$",  # of masks
    known_fields=frozenset(
        {
            "n_inner",
            "layer_norm_epsilon",
            "partial_rotary_factor",
            "rotary_dim",
            *OTHER_HEADS,
            *DROPOUT,
        }
    ),
    fixed_fields={"rotary": True, "scale_attn_weights": True},
    defaults={
        "activation_function": "gelu_new",
        "tie_word_embeddings": False,
        "layer_norm_epsilon": 1e-5,
        "rope_theta": 10000.0,
        "n_positions": 2048,
        "rotary_dim": 64,
    },
)

FAMILIES.add("gptj", GPTJ)
