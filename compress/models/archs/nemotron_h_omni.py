"""Nemotron 3 Nano Omni (NVIDIA, 2026): the text model is Nemotron-H. Its vision tower is RADIO, and that of
audio, if it has one, Parakeet. Where the config counts layers that predict further tokens, images are normed
once more after their tower; checkpoints store no weights of that norm, which are 1 and 0."""

from dataclasses import replace

from compress.models.archs.nemotron_h import NEMOTRON_H, mtp_names
from compress.models.family import FAMILIES
from compress.models.wrapper import wrapper

_ON_DISK = ("vision_model", "mlp1", "sound_encoder", "sound_projection", "vision_projector")
# `transformers` renames and splits tensors of these parts; those that it saved so stay as they are.
_IN_MEMORY = ("multi_modal_projector", "audio_tower", "embed_audio", "vision_final_layernorm")

NEMOTRON_H_OMNI = wrapper(
    "nemotron_h_omni",
    "NemotronH_Omni_Reasoning_V3",
    NEMOTRON_H,
    text_paths=(("text_config",), ("llm_config",)),
    layer_prefix="language_model.backbone.layers.",
    outer_modules={
        "embed": "language_model.backbone.embeddings",
        "norm": "language_model.backbone.norm_f",
        "head": "language_model.lm_head",
    },
    in_memory={"language_model.backbone.": "language_model.model."},
    mtp=replace(mtp_names("language_model.mtp"), count_decides=True),
    ignored_tensors=r"rotary_emb\.inv_freq$|^(language_model\.)?mtp\.",
    untouched=(*_ON_DISK, *_IN_MEMORY),
)

FAMILIES.add("nemotron_h_omni", NEMOTRON_H_OMNI)
