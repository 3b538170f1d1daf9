"""Gemma 4 12B, the text model alone: Gemma 4 without experts and without embeddings for each layer, with
windows and positions of other sizes where its config leaves them out."""

from dataclasses import replace

from compress.models.archs.gemma4_text import GEMMA4_TEXT
from compress.models.family import FAMILIES
from compress.models.wrapper import sized

GEMMA4_UNIFIED_TEXT = replace(
    sized(GEMMA4_TEXT, max_position_embeddings=262144, sliding_window=1024, hidden_size_per_layer_input=0),
    model_type="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    mixture=None,
    expert_layouts=(),
    outer_modules={
        name: disk for name, disk in GEMMA4_TEXT.outer_modules.items() if not name.startswith("layer_embeds.")
    },
    layer_modules={
        name: disk
        for name, disk in GEMMA4_TEXT.layer_modules.items()
        if not name.startswith(("moe.", "layer_embed."))
    },
    fixed_fields={"hidden_size_per_layer_input": 0, "enable_moe_block": False},
)

FAMILIES.add("gemma4_unified_text", GEMMA4_UNIFIED_TEXT)
