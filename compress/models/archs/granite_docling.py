"""Granite Docling (IBM, 2026): the text model is Granite, to some of whose layers features of pages are
added."""

from dataclasses import replace

from compress.models.archs.granite import GRANITE
from compress.models.family import FAMILIES
from compress.models.wrapper import wrapper

_TEXT = replace(
    GRANITE,
    model_type="granite_docling_text",
    defaults={
        **GRANITE.defaults,
        "vocab_size": 133800,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.263,
        "attention_multiplier": 0.015625,
        "logits_scaling": 4.0,
    },
)

FAMILIES.add(
    "granite_docling",
    wrapper(
        "granite_docling",
        "GraniteDoclingForConditionalGeneration",
        _TEXT,
        layer_prefix="model.text_model.layers.",
        outer_modules={
            "embed": "model.text_model.embed_tokens",
            "norm": "model.text_model.norm",
            "head": "lm_head",
        },
        layers_are_numbered=True,
        untouched=("model.vision_model", "model.density_router", "mtp"),
    ),
)
