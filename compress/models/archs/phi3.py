"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (arXiv 2404.14219, 2412.08905, 2503.01743): Llama with stacked q, k, v
and gate, up; LongRoPE, a part of each head rotated, or a sliding window where they are stated."""

from typing import Any

from compress.models.family import (
    FAMILIES,
    LAYER_MODULES,
    STACKED_GATE_UP,
    STACKED_QKV,
    Family,
    same_window,
)
from compress.untrusted.fields import Fields

# The names that the published configs and `transformers` give to what is LongRoPE in both.
_OLD_NAMES = ("su", "yarn")


def _implied(config: Fields) -> dict[str, Any]:
    """Return `rope_parameters` with LongRoPE under its name. `auto_map` is that of the code from before
    `transformers` had the class, and nothing else is taken for it."""
    names = config.mapping("auto_map", default={})
    if odd := [name for name in names.values() if str(name).rpartition(".")[2] not in _OWN_CODE]:
        raise config.wrong("auto_map", odd[0], f"one of {', '.join(_OWN_CODE)}")
    stated = config.mapping("rope_scaling", default=config.mapping("rope_parameters", default={}))
    kind = stated.get("rope_type", stated.get("type"))
    if kind not in _OLD_NAMES:
        return {}
    return {"rope_parameters": {**stated, "rope_type": "longrope"}}


_OWN_CODE = ("Phi3Config", "Phi3ForCausalLM", "GPT2TokenizerFast")

FAMILIES.add(
    "phi3",
    Family(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        windows=same_window,
        implied=_implied,
        layer_modules={**LAYER_MODULES, **STACKED_QKV, **STACKED_GATE_UP},
        known_fields=frozenset(
            {"sliding_window", "partial_rotary_factor", "auto_map", "embd_pdrop", "resid_pdrop"}
        ),
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
    ),
)
