"""Command A Vision (Cohere, 2025): the text model is that of Command A."""

from compress.models.archs.aya_vision import COHERE2_SIZED, SCALE_NOTE
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_MODEL_NAMES, wrapper

FAMILIES.add(
    "cohere2_vision",
    wrapper(
        "cohere2_vision",
        "Cohere2VisionForConditionalGeneration",
        COHERE2_SIZED,
        ties_by_default=True,
        computed_otherwise=SCALE_NOTE,
        **LLAVA_MODEL_NAMES,
    ),
)
