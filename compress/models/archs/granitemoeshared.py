"""Granite 3 mixtures of experts with a shared expert: as `granitemoe`, and every token also goes through an
FFN whose gate and up are one tensor."""

from compress.models.archs.granitemoe import (
    DEFAULTS,
    EXPERT_FIELDS,
    LAYOUTS,
    MODULES,
    MULTIPLIERS,
    multipliers,
)
from compress.models.family import FAMILIES, Family
from compress.models.mixture import Mixture

GRANITEMOESHARED = Family(
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    facts=multipliers,
    mixture=Mixture(
        {**EXPERT_FIELDS, "shared_size": "shared_intermediate_size"}, facts={"score": "softmax_topk"}
    ),
    layer_modules={
        **MODULES,
        "moe.shared.gate": "shared_mlp.input_linear",
        "moe.shared.up": "shared_mlp.input_linear",
        "moe.shared.down": "shared_mlp.output_linear",
    },
    expert_layouts=LAYOUTS,
    known_fields=frozenset(
        {
            "attention_bias",
            "num_local_experts",
            "num_experts_per_tok",
            "shared_intermediate_size",
            *MULTIPLIERS,
        }
    ),
    defaults={**DEFAULTS, "shared_intermediate_size": 0},
)

FAMILIES.add("granitemoeshared", GRANITEMOESHARED)
