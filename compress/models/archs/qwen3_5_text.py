"""The text model of Qwen3.5: three of four layers have gated delta nets (arXiv 2412.06464), the others
attention with an output gate, whose rows on disk take turns with those of the queries by head. Layers that
predict further tokens are untouched."""

from typing import Any

from compress.models.archs.qwen3_next import zero_centered_norms
from compress.models.delta_net_config import (
    DELTA_DEFAULTS,
    DELTA_FIELDS,
    DELTA_MODULES,
    GATE_AFTER_QUERY,
    GATE_FIELDS,
    delta_net_of,
    linear_but_every_nth,
)
from compress.models.family import FAMILIES, Family
from compress.models.module_names import LAYER_MODULES
from compress.models.rope_config import rope_of_text
from compress.untrusted.fields import Fields


def _implied(config: Fields) -> dict[str, Any]:
    return linear_but_every_nth(config) | rope_of_text(config)


QWEN3_5 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    qk_norm=True,
    output_gate=True,
    facts=zero_centered_norms,
    implied=_implied,
    delta=delta_net_of,
    rows_in_turns=frozenset(GATE_AFTER_QUERY.values()),
    layer_modules={**LAYER_MODULES, **GATE_AFTER_QUERY, **DELTA_MODULES},
    known_fields=DELTA_FIELDS | {"partial_rotary_factor"},
    fixed_fields={"attention_bias": False, **GATE_FIELDS},
    defaults={
        **DELTA_DEFAULTS,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32768,
    },
    untouched=("mtp",),
)
FAMILIES.add("qwen3_5_text", QWEN3_5)
