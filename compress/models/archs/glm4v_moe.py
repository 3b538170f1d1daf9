"""GLM-4.5V and GLM-4.6V (arXiv 2507.01006): the text model is GLM-4.5 without norms of q and k. Its rope has
sections for the time, height and width of a token, which are equal for text: it is the plain rope there."""

from dataclasses import replace

from compress.models.archs.glm4_moe import GLM4_MOE
from compress.models.family import FAMILIES
from compress.models.rope_config import rope_of_text
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, wrapper

_TEXT = replace(
    GLM4_MOE,
    model_type="glm4v_moe_text",
    qk_norm=False,
    implied=rope_of_text,
    known_fields=GLM4_MOE.known_fields - {"use_qk_norm"},
    fixed_fields={"use_qk_norm": False},
    defaults={
        **{name: value for name, value in GLM4_MOE.defaults.items() if name != "use_qk_norm"},
        "attention_bias": True,
        "max_position_embeddings": 65536,
    },
)
FAMILIES.add(
    "glm4v_moe",
    wrapper("glm4v_moe", "Glm4vMoeForConditionalGeneration", _TEXT, text_ties=True, **LANGUAGE_MODEL_NAMES),
)
