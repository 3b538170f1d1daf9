"""GLM-ASR (Zhipu AI, 2025): the text model is `llama`, next to an encoder of audio with a rope. What a text
config leaves out has the values of GLM-ASR Nano."""

from dataclasses import replace

from compress.models.archs.llama import LLAMA
from compress.models.family import FAMILIES
from compress.models.wrapper import AUDIO_NAMES, wrapper

_TEXT = replace(
    LLAMA,
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "vocab_size": 59264,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
)

FAMILIES.add(
    "glmasr",
    wrapper("glmasr", "GlmAsrForConditionalGeneration", _TEXT, ties_by_default=True, **AUDIO_NAMES),
)
