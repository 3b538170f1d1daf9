"""GPT-NeoX and Pythia (EleutherAI, arXiv 2204.06745, 2304.01373): attention and FFN side by side, each after
its own LayerNorm with a bias, or one after the other; a part of each head rotates, and an FFN without gates
has the activation gelu. On disk the rows of queries, keys and values take turns by head."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.limits import MAX_SIZE, THETAS
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

_ROPE = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
"""Fields of a rope -> their names next to it, the only ones by which `transformers` reads them there."""
_LIMITS = {"rope_theta": THETAS, "partial_rotary_factor": (0, 1)}


def _facts(config: Fields) -> dict[str, Any]:
    beside = config.flag("use_parallel_residual")
    block = {"block": "parallel", "own_ffn_norm": True} if beside else {"block": "pre"}
    return {"norm": "layer", "norm_bias": True, **block}


def implied_rope(config: Fields) -> dict[str, Any]:
    """Return the rope, and as many heads of keys and values as of queries, whatever is stated. A standard
    name next to the rope has to agree with it: programs differ in which of them they read."""
    stated = config.mapping("rope_scaling", default={}) or config.mapping("rope_parameters", default={})
    rope = {**{name: config.number(own, *_LIMITS[name]) for name, own in _ROPE.items()}, **stated}
    for name, limits in _LIMITS.items():
        if config.has(name) and config.number(name, *limits) != rope[name]:
            raise config.wrong(name, config.number(name, *limits), f"{rope[name]}, as its rope says")
    return {
        "rope_parameters": rope,
        "num_key_value_heads": config.integer("num_attention_heads", 1, MAX_SIZE),
    }


FAMILIES.add(
    "gpt_neox",
    Family(
        model_type="gpt_neox",
        architecture="GPTNeoXForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        ffn_bias=True,
        gated=False,
        heads_divide_hidden=True,
        heads_span_hidden=True,
        facts=_facts,
        implied=implied_rope,
        spelled={"rms_norm_eps": "layer_norm_eps"},
        rows_in_turns=frozenset({"attention.query_key_value"}),
        outer_modules={
            "embed": "gpt_neox.embed_in",
            "norm": "gpt_neox.final_layer_norm",
            "head": "embed_out",
        },
        layer_prefix="gpt_neox.layers.",
        layer_modules={
            **LAYER_MODULES,
            "attn": "attention",
            **dict.fromkeys(("attn.q", "attn.k", "attn.v"), "attention.query_key_value"),
            "attn.o": "attention.dense",
            "ffn.up": "mlp.dense_h_to_4h",
            "ffn.down": "mlp.dense_4h_to_h",
        },
        in_memory={"embed_out": "lm_head"},
        ignored_tensors=r"rotary_emb\.inv_freq$|attention\.(masked_)?bias$",  # of masks in older checkpoints
        known_fields=frozenset(
            {
                "attention_bias",
                "layer_norm_eps",
                "use_parallel_residual",
                "partial_rotary_factor",
                *_ROPE.values(),
            }
        ),
        defaults={
            "hidden_act": "gelu",
            "tie_word_embeddings": False,
            "layer_norm_eps": 1e-5,
            "rotary_emb_base": 10000.0,
            "rotary_pct": 0.25,
            "max_position_embeddings": 2048,
            "attention_bias": True,
            "use_parallel_residual": True,
        },
    ),
)
