"""InternLM3 (Shanghai AI Laboratory, 2025): Llama, with other names of the fields that state its biases."""

from dataclasses import replace
from typing import Any

from compress.models.archs.llama import LLAMA
from compress.models.config_facts import implies_own_code
from compress.models.family import FAMILIES
from compress.untrusted.fields import Fields


def _facts(config: Fields) -> dict[str, Any]:
    """Return no facts; refuse biases of q, k and v without those of the other linears, or the opposite, of
    which programs compute different models."""
    biases = [config.flag(name, default=False) for name in ("attention_bias", "mlp_bias")]
    if biases[0] != biases[1]:
        raise config.wrong("bias", biases[1], "the same as qkv_bias")
    return {}


FAMILIES.add(
    "internlm3",
    replace(
        LLAMA,
        model_type="internlm3",
        architecture="LlamaForCausalLM",
        other_names=("InternLM3ForCausalLM",),
        facts=_facts,
        implied=implies_own_code("InternLM3Config", "InternLM3Model", "InternLM3ForCausalLM"),
        aliases={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
        known_fields=LLAMA.known_fields | {"auto_map"},
        defaults={
            **LLAMA.defaults,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 32768,
        },
    ),
)
