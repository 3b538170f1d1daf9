"""DeepSeek-VL (arXiv 2403.05525), the models with a second tower for large images: the text model is
`llama`."""

from dataclasses import replace

from compress.models.archs.deepseek_vl import DEEPSEEK_VL
from compress.models.family import FAMILIES

_SECOND_TOWER = tuple(f"model.high_res_vision_{part}" for part in ("model", "neck", "proj", "alpha"))

FAMILIES.add(
    "deepseek_vl_hybrid",
    replace(
        DEEPSEEK_VL,
        model_type="deepseek_vl_hybrid",
        architecture="DeepseekVLHybridForConditionalGeneration",
        untouched=(*DEEPSEEK_VL.untouched, *_SECOND_TOWER),
    ),
)
