"""Phi-1, Phi-1.5 and Phi-2 (Microsoft, arXiv 2306.11644, 2309.05463): attention and FFN side by side after
one LayerNorm, all linears and the head with biases, FFNs without gates, and a part of each head that rotates.
"""

from typing import Any

from compress.errors import UnsupportedArch
from compress.models.family import FAMILIES, Family
from compress.models.module_names import LAYER_MODULES, OUTER_MODULES
from compress.untrusted.fields import Fields


def _facts(config: Fields) -> dict[str, Any]:
    if config.flag("qk_layernorm"):
        raise UnsupportedArch(
            f"{config.where} has qk_layernorm = true: heads of q and k have LayerNorms with biases, which "
            "are not read here. Phi models without them are supported, as all published ones are."
        )
    return {"norm": "layer", "norm_bias": True, "block": "parallel", "head_bias": True}


FAMILIES.add(
    "phi",
    Family(
        model_type="phi",
        architecture="PhiForCausalLM",
        qkv_bias=True,
        o_bias=True,
        ffn_bias=True,
        gated=False,
        facts=_facts,
        spelled={"rms_norm_eps": "layer_norm_eps"},
        outer_modules={**OUTER_MODULES, "norm": "model.final_layernorm"},
        layer_modules={
            **{name: disk for name, disk in LAYER_MODULES.items() if name not in ("ffn_norm", "ffn.gate")},
            "attn.o": "self_attn.dense",
            "ffn.up": "mlp.fc1",
            "ffn.down": "mlp.fc2",
        },
        known_fields=frozenset(
            {"layer_norm_eps", "partial_rotary_factor", "qk_layernorm", "embd_pdrop", "resid_pdrop"}
        ),
        defaults={
            "hidden_act": "gelu_new",
            "tie_word_embeddings": False,
            "layer_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 2048,
            "qk_layernorm": False,
        },
    ),
)
