"""Phi-4-multimodal (Microsoft, arXiv 2503.01743) as `transformers` has it: the text model is Phi-4-mini, and
the whole has its fields. Text does without the adapters (LoRA) of images and sound, which lie in files of
their own there."""

from dataclasses import replace
from typing import Any

from compress.models.archs.phi3 import PHI3, check_rope_of_phi
from compress.models.family import FAMILIES
from compress.models.wrapper import sized, wrapper
from compress.untrusted.fields import Fields


def _implied(config: Fields) -> dict[str, Any]:
    check_rope_of_phi(config)
    return {}


_TEXT = sized(
    replace(
        PHI3,
        model_type="phi4_multimodal",
        architecture="Phi4MultimodalForCausalLM",
        implied=_implied,
        known_fields=PHI3.known_fields - {"auto_map"},
    ),
    vocab_size=200064,
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
)

FAMILIES.add(
    "phi4_multimodal",
    wrapper(
        "phi4_multimodal",
        "Phi4MultimodalForCausalLM",
        _TEXT,
        text_paths=(),
        has_adapters=True,
        layers_are_numbered=True,
        untouched=("model.embed_tokens_extend",),
        outside=frozenset({"vision_config", "audio_config"}),
    ),
)
