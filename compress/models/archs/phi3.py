"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (arXiv 2404.14219, 2412.08905, 2503.01743): Llama with stacked q, k, v
and gate, up; LongRoPE, a part of each head rotated, or a sliding window where they are stated."""

from typing import Any

from compress.models.config_facts import only_own_code
from compress.models.family import FAMILIES, Family
from compress.models.layer_types import same_window
from compress.models.module_names import LAYER_MODULES, STACKED_GATE_UP, STACKED_QKV
from compress.untrusted.fields import Fields

_ROPES = ("default", "longrope")


def _implied(config: Fields) -> dict[str, Any]:
    """Imply nothing, and refuse what would be read otherwise than `transformers` does: an `auto_map` to other
    code than the model's own from before it was in `transformers`, and other ropes."""
    only_own_code(config, ("Phi3Config", "Phi3ForCausalLM"))
    check_rope_of_phi(config)
    return {}


def check_rope_of_phi(config: Fields) -> None:
    """Refuse other ropes than the plain one and LongRoPE, for which `transformers` takes all others.

    Raises:
        UnsupportedArch: there is another.
    """
    rope = config.mapping("rope_parameters", default=config.mapping("rope_scaling", default={}))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPES:
        raise config.wrong("rope_type", kind, f"one of {', '.join(_ROPES)}")


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    heads_span_hidden=True,
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
)

FAMILIES.add("phi3", PHI3)
