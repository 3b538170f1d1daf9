"""Qwen2.5-Omni (arXiv 2503.20215): the text model is that of its thinker, Qwen2. Its rope has sections for
the time, height and width of a token, which are equal for text: it is the plain rope there. The talker and
the vocoder, which make sound of its last hidden states, are untouched."""

from dataclasses import replace

from compress.models.archs.qwen2 import QWEN2
from compress.models.family import FAMILIES
from compress.models.rope_config import rope_of_text
from compress.models.wrapper import wrapper

TEXT = replace(
    QWEN2,
    model_type="qwen2_5_omni_text",
    implied=rope_of_text,
    known_fields=QWEN2.known_fields | {"init_std"},
    defaults={
        **QWEN2.defaults,
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
    },
)
VOICES_NOTE = (
    "transformers loads the whole model only next to spk_dict.pt, a pickle of its voices, which is read and "
    "copied by nothing here: copy it from the source to what is exported."
)

FAMILIES.add(
    "qwen2_5_omni",
    wrapper(
        "qwen2_5_omni",
        "Qwen2_5OmniForConditionalGeneration",
        TEXT,
        other_names=("Qwen2_5OmniModel",),
        computed_otherwise=VOICES_NOTE,
        text_paths=(("thinker_config", "text_config"),),
        untouched_elsewhere=("visual", "audio_tower"),
        layer_prefix="thinker.model.layers.",
        outer_modules={
            "embed": "thinker.model.embed_tokens",
            "norm": "thinker.model.norm",
            "head": "thinker.lm_head",
        },
        in_memory={
            "thinker.visual.": "thinker.model.visual.",
            "thinker.audio_tower.": "thinker.model.audio_tower.",
            "thinker.model.": "thinker.model.language_model.",
        },
        untouched=("thinker.visual", "thinker.audio_tower", "talker", "token2wav"),
    ),
)
