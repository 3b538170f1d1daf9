"""Families of which no export was tested with vLLM."""

UNTESTED = {
    "cohere_compass": "North Micro Vision",
    "cohere_compass_text": "North Micro Vision",
    "xglm": "XGLM",
    "biogpt": "BioGPT",
    "idefics2": "Idefics 2",
    "cosmos3_edge": "Cosmos 3 Edge",
    "aria_text": "the text model of Aria alone",
    "audioflamingo3": "Audio Flamingo 3",
    "musicflamingo": "Music Flamingo",
    "voxtral": "Voxtral",
    "qwen2_audio": "Qwen2-Audio",
    "qwen3_asr": "Qwen3-ASR",
    "granite_speech": "Granite Speech",
    "granite_speech_plus": "Granite Speech Plus",
    "glmasr": "GLM-ASR",
    "vibevoice_asr": "VibeVoice-ASR",
    "fun_asr_nano": "Fun-ASR-Nano",
}
"""The name of the models of each."""


def reasons() -> dict[str, str]:
    """Return for each family why vLLM is not stated to load it."""
    return {family: f"no export of {models} was tested with it" for family, models in UNTESTED.items()}
