"""StableLM (Stability AI): LayerNorm with a bias, a part of each head rotates, q, k and v may have biases,
and attention and FFN follow one another, or are side by side after one norm."""

from typing import Any

from compress.errors import UnsupportedArch
from compress.models.family import FAMILIES, Family
from compress.untrusted.fields import Fields


def _facts(config: Fields) -> dict[str, Any]:
    if config.flag("qk_layernorm"):
        raise UnsupportedArch(
            f"{config.where} has qk_layernorm = true: the LayerNorm of each head of q and of k is a tensor "
            "of its own, which is not read here. StableLM models without it are supported."
        )
    beside = config.flag("use_parallel_residual")
    return {"norm": "layer", "norm_bias": True, "block": "parallel" if beside else "pre"}


FAMILIES.add(
    "stablelm",
    Family(
        model_type="stablelm",
        architecture="StableLmForCausalLM",
        qkv_bias="use_qkv_bias",
        heads_span_hidden=True,
        facts=_facts,
        spelled={"rms_norm_eps": "layer_norm_eps"},
        known_fields=frozenset(
            {
                "layer_norm_eps",
                "partial_rotary_factor",
                "qk_layernorm",
                "use_parallel_residual",
                "use_qkv_bias",
            }
        ),
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "layer_norm_eps": 1e-5,
            "num_key_value_heads": 32,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "max_position_embeddings": 4096,
            "qk_layernorm": False,
            "use_parallel_residual": False,
        },
    ),
)
