"""The text model of Qwen3.5: three of four layers have gated delta nets (arXiv 2412.06464), the others
attention with an output gate, whose rows on disk take turns with those of the queries by head. The layer that
predicts a further token is untouched but where it drafts (`mtp.py`)."""

from dataclasses import replace
from typing import Any

from compress.models.archs.qwen2_moe import MIXTURE_FIELDS
from compress.models.archs.qwen3_next import QWEN3_NEXT
from compress.models.delta_net_config import DELTA_MODULES, GATE_AFTER_QUERY, linear_but_every_nth
from compress.models.family import FAMILIES
from compress.models.module_names import LAYER_MODULES
from compress.models.rope_config import rope_of_text
from compress.untrusted.fields import Fields


def _implied(config: Fields) -> dict[str, Any]:
    return linear_but_every_nth(config) | rope_of_text(config)


_OF_EXPERTS = MIXTURE_FIELDS | {"intermediate_size"}
QWEN3_5 = replace(
    QWEN3_NEXT,
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    implied=_implied,
    rows_in_turns=frozenset(GATE_AFTER_QUERY.values()),
    mixture=None,
    layer_modules={**LAYER_MODULES, **GATE_AFTER_QUERY, **DELTA_MODULES},
    expert_layouts=(),
    known_fields=QWEN3_NEXT.known_fields - MIXTURE_FIELDS,
    defaults={
        **{name: value for name, value in QWEN3_NEXT.defaults.items() if name not in _OF_EXPERTS},
        "num_key_value_heads": 4,
    },
)
FAMILIES.add("qwen3_5_text", QWEN3_5)
