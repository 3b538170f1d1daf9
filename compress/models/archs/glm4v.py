"""GLM-4.1V (arXiv 2507.01006): the text model is GLM-4 of 2025. Its rope has sections for the time, height
and width of a token, which are equal for text: it is the plain rope there."""

from dataclasses import replace

from compress.models.archs.glm4 import GLM4
from compress.models.family import FAMILIES
from compress.models.rope_config import rope_of_text
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, wrapper

TEXT = replace(
    GLM4,
    model_type="glm4v_text",
    qkv_bias=True,
    heads_span_hidden=True,
    implied=rope_of_text,
    known_fields=frozenset({"partial_rotary_factor"}),
    fixed_fields={"attention_bias": True},
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
    },
)
GLM4V = wrapper("glm4v", "Glm4vForConditionalGeneration", TEXT, text_ties=True, **LANGUAGE_MODEL_NAMES)

FAMILIES.add("glm4v", GLM4V)
