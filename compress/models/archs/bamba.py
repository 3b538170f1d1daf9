"""Bamba (IBM, Princeton, CMU and UIUC, 2024): most layers have a Mamba-2 mixer in place of attention, of
which half of each head rotates."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.layer_types import FULL, LINEAR
from compress.models.limits import MAX_LAYERS
from compress.models.mamba2_config import (
    MAMBA_DEFAULTS,
    MAMBA_FIELDS,
    MAMBA_FIXED,
    MAMBA_MODULES,
    mamba2_of,
)
from compress.models.module_names import LAYER_MODULES, OUTER_MODULES
from compress.untrusted.fields import Fields

_ATTENDING = "attn_layer_indices"


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of the layers, of which a config states those with attention."""
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    attending = config.integers(_ATTENDING, 0, MAX_LAYERS) if config.has(_ATTENDING) else []
    types = [FULL if idx in attending else LINEAR for idx in range(num_layers)]
    return {_ATTENDING: attending, "layer_types": types}


FAMILIES.add(
    "bamba",
    Family(
        model_type="bamba",
        architecture="BambaForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        ffn_bias="mlp_bias",
        implied=_implied,
        recurrence=mamba2_of,
        outer_modules={**OUTER_MODULES, "norm": "model.final_layernorm"},
        layer_modules={
            **{name: module.replace("mlp.", "feed_forward.") for name, module in LAYER_MODULES.items()},
            "ffn_norm": "pre_ff_layernorm",
            **MAMBA_MODULES,
        },
        known_fields=MAMBA_FIELDS
        | frozenset({"attention_bias", "mlp_bias", _ATTENDING, "partial_rotary_factor"}),
        fixed_fields={**MAMBA_FIXED, "partial_rotary_factor": 0.5},
        defaults={
            **MAMBA_DEFAULTS,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "max_position_embeddings": 262144,
        },
    ),
)
