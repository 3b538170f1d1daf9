"""Janus (DeepSeek, arXiv 2410.13848): images are read by a tower and made by another model; the text model is
`llama`."""

from compress.models.archs.llava import LLAMA_7B
from compress.models.family import FAMILIES
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, wrapper

_PARTS = (
    "vision_model",
    "aligner",
    "vqmodel",
    "generation_embeddings",
    "generation_aligner",
    "generation_head",
)

FAMILIES.add(
    "janus",
    wrapper(
        "janus",
        "JanusForConditionalGeneration",
        LLAMA_7B,
        ties_by_default=True,
        **{**LANGUAGE_MODEL_NAMES, "untouched": tuple(f"model.{part}" for part in _PARTS)},
    ),
)
