"""Mamba-2 (arXiv 2405.21060) in the format of `transformers`, and Mamba-Codestral 7B (Mistral AI, 2024):
every layer is one Mamba-2 mixer, without attention and without an FFN."""

from compress.models.attention_free import (
    DEFAULTS,
    FIXED_FIELDS,
    IN_FLOAT32,
    KNOWN_FIELDS,
    MIXER_MODULES,
    OUTER_NAMES,
    SPELLED,
    no_attention,
)
from compress.models.family import FAMILIES, Family
from compress.models.layer_types import no_layer
from compress.models.mamba2_config import MAMBA_FIELDS, MAMBA_MODULES, mamba2_of

FAMILIES.add(
    "mamba2",
    Family(
        model_type="mamba2",
        architecture="Mamba2ForCausalLM",
        attention_free=True,
        computed_otherwise=IN_FLOAT32,
        rotated_layers=no_layer,
        half_layers=True,
        spelled={
            **SPELLED,
            "mamba_n_heads": "num_heads",
            "mamba_n_groups": "n_groups",
            "mamba_d_head": "head_dim",
            "mamba_chunk_size": "chunk_size",
        },
        implied=no_attention,
        recurrence=mamba2_of,
        outer_modules=OUTER_NAMES,
        layer_prefix="backbone.layers.",
        layer_modules={
            **{name: each.replace("mamba.", "mixer.") for name, each in MAMBA_MODULES.items()},
            **MIXER_MODULES,
        },
        known_fields=KNOWN_FIELDS | MAMBA_FIELDS,
        fixed_fields={**FIXED_FIELDS, "hidden_act": "silu"},
        defaults={
            **DEFAULTS,
            "num_heads": 128,
            "head_dim": 64,
            "n_groups": 8,
            "state_size": 128,
            "tie_word_embeddings": False,
        },
    ),
)
