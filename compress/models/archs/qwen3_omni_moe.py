"""Qwen3-Omni (arXiv 2509.17765): the text model is that of its thinker, Qwen3's mixture of experts. Its rope
has sections for the time, height and width of a token, which are equal for text: it is the plain rope there.
The talker, which makes sound of it, is untouched, and reads one of its layers."""

from dataclasses import replace

from compress.models.archs.qwen3_moe import QWEN3_MOE
from compress.models.family import FAMILIES
from compress.models.layer_types import no_window
from compress.models.rope_config import rope_of_text
from compress.models.wrapper import wrapper

_WINDOWS = {"sliding_window", "use_sliding_window", "max_window_layers"}
TEXT = replace(
    QWEN3_MOE,
    model_type="qwen3_omni_moe_text",
    windows=no_window,
    implied=rope_of_text,
    aliases={},
    known_fields=QWEN3_MOE.known_fields - _WINDOWS,
    fixed_fields={"shared_expert_intermediate_size": 0},  # the talker has such experts
    defaults={
        **{name: value for name, value in QWEN3_MOE.defaults.items() if name not in _WINDOWS},
        "intermediate_size": 18944,
        "norm_topk_prob": True,
        "rope_theta": 1000000.0,
    },
)

FAMILIES.add(
    "qwen3_omni_moe",
    wrapper(
        "qwen3_omni_moe",
        "Qwen3OmniMoeForConditionalGeneration",
        TEXT,
        text_paths=(("thinker_config", "text_config"),),
        layers_are_numbered=True,
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
        untouched=("thinker.visual", "thinker.audio_tower", "talker", "code2wav"),
    ),
)
