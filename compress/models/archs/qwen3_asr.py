"""Qwen3-ASR (arXiv 2601.21337) as `transformers` has it: the text model is `qwen3`, next to the audio
tower of Qwen3-Omni."""

from compress.errors import UnsupportedArch
from compress.models.archs.lighton_ocr import QWEN3_INSIDE
from compress.models.family import FAMILIES
from compress.models.wrapper import AUDIO_MODEL_NAMES, wrapper
from compress.untrusted.fields import Fields


def _check_form(whole: Fields) -> None:
    """Check that a config has the form of `transformers`.

    Raises:
        UnsupportedArch: it has that of Qwen's own package.
    """
    if whole.has("thinker_config"):
        raise UnsupportedArch(
            f"{whole.where} has thinker_config, the form of Qwen's own package, which transformers does not "
            "load; name the checkpoint of the same model that ends in -hf."
        )


FAMILIES.add(
    "qwen3_asr",
    wrapper(
        "qwen3_asr",
        "Qwen3ASRForConditionalGeneration",
        QWEN3_INSIDE,
        ties_by_default=True,
        check_whole=_check_form,
        **AUDIO_MODEL_NAMES,
    ),
)
