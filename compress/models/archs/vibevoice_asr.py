"""VibeVoice-ASR (Microsoft, arXiv 2601.18184) as `transformers` has it: the text model is `qwen2`, next to an
encoder of sound and one of its meaning."""

from compress.models.archs.qwen2 import DEFAULT_SIZES, QWEN2
from compress.models.family import FAMILIES
from compress.models.wrapper import LLAVA_NAMES, sized, wrapper

_PARTS = ("acoustic_tokenizer_encoder", "semantic_tokenizer_encoder", "multi_modal_projector")

FAMILIES.add(
    "vibevoice_asr",
    wrapper(
        "vibevoice_asr",
        "VibeVoiceAsrForConditionalGeneration",
        sized(QWEN2, **DEFAULT_SIZES),
        own_head=True,
        **{
            **LLAVA_NAMES,
            "in_memory": {
                "language_model.model.": "model.language_model.",
                "language_model.lm_head": "lm_head",
                **{f"{part}.": f"model.{part}." for part in _PARTS},
            },
            "untouched": _PARTS,
        },
    ),
)
