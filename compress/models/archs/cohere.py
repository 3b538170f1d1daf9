"""Command R and Aya (Cohere): attention and FFN side by side after one LayerNorm without a bias; neighbouring
dimensions of a head rotate as a pair, and the logits have a factor. Each head of q and k of Command R+ has a
LayerNorm of its own."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.limits import SCALES
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields


def _facts(config: Fields) -> dict[str, Any]:
    return {
        "norm": "layer",
        "block": "parallel",
        "logit_scale": config.number("logit_scale", *SCALES),
        "own_qk_norm": config.flag("use_qk_norm", default=False),
    }


COHERE = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    qk_norm="use_qk_norm",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    facts=_facts,
    interleaved_rotary=True,
    spelled={"rms_norm_eps": "layer_norm_eps"},
    layer_modules={name: disk for name, disk in LAYER_MODULES.items() if name != "ffn_norm"},
    known_fields=frozenset({"attention_bias", "logit_scale", "layer_norm_eps", "use_qk_norm"}),
    in_heads=frozenset({"attn.q_norm.weight", "attn.k_norm.weight"}),
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "layer_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "logit_scale": 0.0625,
    },
)
FAMILIES.add("cohere", COHERE)
