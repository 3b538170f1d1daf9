"""Fun-ASR-Nano (Alibaba Tongyi, arXiv 2509.12508) as `transformers` has it: the text model is `qwen3`, next
to an encoder with a memory of the frames around each."""

from compress.models.archs.lighton_ocr import QWEN3_INSIDE
from compress.models.family import FAMILIES
from compress.models.wrapper import AUDIO_MODEL_NAMES, wrapper

FAMILIES.add(
    "fun_asr_nano",
    wrapper(
        "fun_asr_nano",
        "FunAsrNanoForConditionalGeneration",
        QWEN3_INSIDE,
        ties_by_default=True,
        **AUDIO_MODEL_NAMES,
    ),
)
