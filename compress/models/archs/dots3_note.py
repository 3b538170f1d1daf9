"""dots3-note (Dots Studio, 2026): the text model (`dots3_note_text`) with its vision and audio towers.
Published configs hold the fields of the text model among their own."""

from compress.models.archs.dots3_note_text import DOTS3_NOTE_TEXT
from compress.models.family import FAMILIES
from compress.models.wrapper import wrapper

_TEXT = "model.language_model"
_OUTSIDE = ("vision_config", "audio_config", "image_token_id", "video_token_id", "audio_token_id")

FAMILIES.add(
    "dots3_note",
    wrapper(
        "dots3_note",
        "Dots3NoteForConditionalGeneration",
        DOTS3_NOTE_TEXT,
        other_names=("Dots3NoteForCausalLM",),
        outside=frozenset(_OUTSIDE),
        in_memory={f"model.{part}": f"{_TEXT}.{part}" for part in ("layers.", "embed_tokens.", "norm.")},
        # `transformers` renames tensors of the towers; those that it saved so stay as they are.
        untouched=("vision_encoder", "audio_encoder", "model.vision_tower", "model.audio_tower"),
    ),
)
