"""Voxtral (Mistral AI, arXiv 2507.13264): the text model is `llama`, next to the encoder of Whisper. What a
text config leaves out has the values of Voxtral Mini 3B."""

from compress.models.archs.llama import LLAMA
from compress.models.family import FAMILIES
from compress.models.wrapper import AUDIO_NAMES, sized, wrapper

_TEXT = sized(
    LLAMA,
    vocab_size=131072,
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=30,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=1e8,
)

FAMILIES.add(
    "voxtral", wrapper("voxtral", "VoxtralForConditionalGeneration", _TEXT, own_head=True, **AUDIO_NAMES)
)
