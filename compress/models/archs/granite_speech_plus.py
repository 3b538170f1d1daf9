"""Granite Speech Plus (IBM, 2026): Granite Speech whose projector reads several layers of the encoder."""

from dataclasses import replace

from compress.models.archs.granite_speech import GRANITE_SPEECH
from compress.models.family import FAMILIES

FAMILIES.add(
    "granite_speech_plus",
    replace(
        GRANITE_SPEECH,
        model_type="granite_speech_plus",
        architecture="GraniteSpeechPlusForConditionalGeneration",
    ),
)
