"""The text model of Qwen3.5's mixtures of experts: Qwen3.5 with many small experts and a shared one. All
experts of a layer are in one tensor; codes are written for each expert, as vLLM reads them. The weights of
the chosen experts are always renormalized."""

from dataclasses import replace

from compress.models.archs.qwen2_moe import QWEN2_MIXTURE, SHARED_EXPERT_MODULES
from compress.models.archs.qwen3_5_text import QWEN3_5
from compress.models.family import FAMILIES
from compress.models.mixture import AS_IN_MEMORY, Mixture, apart

_FIELDS = {fact: name for fact, name in QWEN2_MIXTURE.fields.items() if fact != "renormalize"}
QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    mixture=Mixture(_FIELDS, facts={"shared_gate": True, "renormalize": True}),
    layer_modules={**QWEN3_5.layer_modules, **SHARED_EXPERT_MODULES},
    expert_layouts=(AS_IN_MEMORY, apart("mlp.experts", methods=("compressed-tensors", "fp8"))),
    known_fields=QWEN3_5.known_fields | set(_FIELDS.values()),
    defaults={
        **QWEN3_5.defaults,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
)
FAMILIES.add("qwen3_5_moe_text", QWEN3_5_MOE)
