"""Gemma 4 12B, which reads images and sound without towers of their own: the text model is Gemma 4's."""

from compress.models.archs.gemma4_unified_text import GEMMA4_UNIFIED_TEXT
from compress.models.family import FAMILIES
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, wrapper

_EMBEDDER = ("patch_ln1", "patch_dense", "patch_ln2", "pos_embedding", "pos_norm")
_PROJECTION = "embedding_projection"
_NAMES = {
    **LANGUAGE_MODEL_NAMES,
    "in_memory": {
        **{f"model.vision_embedder.{name}": f"model.embed_vision.{name}" for name in _EMBEDDER},
        f"model.embed_vision.{_PROJECTION}": f"model.embed_vision.multimodal_embedder.{_PROJECTION}",
    },
    "untouched": ("model.vision_embedder", "model.embed_vision", "model.embed_audio"),
}

FAMILIES.add(
    "gemma4_unified",
    wrapper(
        "gemma4_unified",
        "Gemma4UnifiedForConditionalGeneration",
        GEMMA4_UNIFIED_TEXT,
        ties_by_default=True,
        **_NAMES,
    ),
)
