"""Falcon-H1 (TII, 2025): attention and a Mamba-2 mixer read the same input in every layer, and their outputs
are added; inputs and outputs of linears have constant factors (muP, arXiv 2203.03466)."""

from typing import Any

from compress.models.config_values import head_dim_of
from compress.models.family import FAMILIES, Family
from compress.models.limits import MAX_SIZE, SCALES
from compress.models.mamba2 import Mamba2
from compress.models.mamba2_config import (
    MAMBA_DEFAULTS,
    MAMBA_FIELDS,
    MAMBA_FIXED,
    MAMBA_MODULES,
    mamba2_of,
)
from compress.models.module_names import LAYER_MODULES, OUTER_MODULES
from compress.untrusted.fields import Fields

_IN = "attention_in_multiplier"
_OUT = "attention_out_multiplier"
_MIXER_IN = "ssm_in_multiplier"
_MIXER_OUT = "ssm_out_multiplier"
_KEY = "key_multiplier"
_NUMBERS = (_IN, _OUT, _MIXER_IN, _MIXER_OUT, _KEY, "embedding_multiplier", "lm_head_multiplier")
_OF_MIXER = ("mamba.gate", "mamba.x", "mamba.B", "mamba.C", "mamba.dt")
_OF_FFN = ("ffn.gate", "ffn.down")
"""The linears of which `ssm_multipliers` and `mlp_multipliers` have a factor each, in order."""
_LISTS = {"ssm_multipliers": _OF_MIXER, "mlp_multipliers": _OF_FFN}
_NORMED = "mamba_rms_norm"
_NORM_FIRST = "mamba_norm_before_gate"


def _facts(config: Fields) -> dict[str, Any]:
    """Return the factors of a model. Those of the inputs of linears without biases are factors of their
    outputs, those of queries and keys one of the scores, and that of the values one of the output of
    attention."""
    stated = {name: config.number(name, *SCALES) for name in _NUMBERS}
    if stated[_IN] != 1 and config.flag("attention_bias"):
        raise config.wrong(_IN, stated[_IN], "1 in a model whose attention has biases")
    factors = {"attn.o": stated[_IN] * stated[_OUT], "mamba.o": stated[_MIXER_OUT]}
    for name, linears in _LISTS.items():
        numbers = config.numbers(name, *SCALES)
        if len(numbers) != len(linears):
            raise config.wrong(name, numbers, f"{len(linears)} numbers")
        factors |= dict(zip(linears, numbers, strict=True))
    factors |= {linear: stated[_MIXER_IN] * factors[linear] for linear in _OF_MIXER}
    scale = stated[_IN] ** 2 * stated[_KEY]
    hidden_size, num_heads = (
        config.integer(name, 1, MAX_SIZE) for name in ("hidden_size", "num_attention_heads")
    )
    head_dim = head_dim_of(config, hidden_size, num_heads)
    return {
        "embed_scale": stated["embedding_multiplier"],
        "logit_scale": stated["lm_head_multiplier"],
        "attn_scale": None if scale == 1 else scale * head_dim**-0.5,
        "linear_factors": tuple((linear, factor) for linear, factor in factors.items() if factor != 1),
    }


def _mixer(config: Fields) -> Mamba2:
    normed = config.flag(_NORMED)
    if normed and config.flag(_NORM_FIRST):
        raise config.wrong(_NORM_FIRST, True, "false: the decoder norms the outputs of gates")
    return mamba2_of(config, normed=normed)


FAMILIES.add(
    "falcon_h1",
    Family(
        model_type="falcon_h1",
        architecture="FalconH1ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        ffn_bias="mlp_bias",
        facts=_facts,
        recurrence=_mixer,
        joint=True,
        outer_modules={**OUTER_MODULES, "norm": "model.final_layernorm"},
        layer_modules={
            **{name: module.replace("mlp.", "feed_forward.") for name, module in LAYER_MODULES.items()},
            "ffn_norm": "pre_ff_layernorm",
            **MAMBA_MODULES,
        },
        known_fields=MAMBA_FIELDS
        | frozenset({*_NUMBERS, *_LISTS, _NORMED, _NORM_FIRST})
        | {"attention_bias", "mlp_bias", "mamba_d_ssm"},
        fixed_fields={**MAMBA_FIXED, "projectors_bias": False},
        defaults={
            **MAMBA_DEFAULTS,
            **dict.fromkeys(_NUMBERS, 1.0),
            **{name: [1.0] * len(linears) for name, linears in _LISTS.items()},
            "mamba_d_ssm": 1024,
            _NORMED: False,
            _NORM_FIRST: True,
            "attention_bias": False,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "max_position_embeddings": 8192,
        },
    ),
)
