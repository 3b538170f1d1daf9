"""Granite's mixtures of experts with sliding windows (IBM, 2026): the attention of `granite_swa` and the
experts of `granitemoeshared`, which checkpoints store as `transformers` has them in memory."""

from dataclasses import replace

from compress.models.archs.granite_swa import FIELDS, implied, rotated_layers
from compress.models.archs.granitemoe import LAYOUTS, multipliers
from compress.models.archs.granitemoeshared import GRANITEMOESHARED
from compress.models.family import FAMILIES
from compress.models.layer_types import windows_by_layer_type

FAMILIES.add(
    "granitemoe_swa",
    replace(
        GRANITEMOESHARED,
        model_type="granitemoe_swa",
        architecture="GraniteMoeSWAForCausalLM",
        windows=windows_by_layer_type,
        rotated_layers=rotated_layers,
        implied=implied,
        facts=lambda config: {**multipliers(config), "attn_sinks": True},
        expert_layouts=LAYOUTS[::-1],
        known_fields=GRANITEMOESHARED.known_fields | FIELDS,
        defaults={**GRANITEMOESHARED.defaults, "sliding_window": 128},
    ),
)
