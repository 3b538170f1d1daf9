"""Qwen3-VL (arXiv 2511.21631): the text model is Qwen3. Its rope has sections for the time, height and width
of a token, in turns; the three are equal for text, so that it is the plain rope there. The features of
several vision layers that are added to the first layers of the text model (DeepStack) come with images
only."""

from dataclasses import replace

from compress.models.archs.qwen3 import QWEN3
from compress.models.family import FAMILIES
from compress.models.layer_types import no_window
from compress.models.rope_config import rope_of_text
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, wrapper

_TEXT = replace(
    QWEN3,
    model_type="qwen3_vl_text",
    windows=no_window,
    implied=rope_of_text,
    known_fields=frozenset({"attention_bias"}),
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 128000,
    },
)
FAMILIES.add(
    "qwen3_vl",
    wrapper("qwen3_vl", "Qwen3VLForConditionalGeneration", _TEXT, **LANGUAGE_MODEL_NAMES),
)
