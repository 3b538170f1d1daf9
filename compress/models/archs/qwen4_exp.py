"""Qwen4 with its vision tower (Qwen, 2026), which is untouched, as are the layers that predict further
tokens."""

from compress.models.archs.qwen4_exp_text import QWEN4_EXP, outer_modules
from compress.models.family import FAMILIES
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, wrapper

_NAMES = {
    **LANGUAGE_MODEL_NAMES,
    "outer_modules": outer_modules("model.language_model."),
    "untouched": (*LANGUAGE_MODEL_NAMES["untouched"], "mtp"),
}
FAMILIES.add("qwen4_exp", wrapper("qwen4_exp", "Qwen4ExpForConditionalGeneration", QWEN4_EXP, **_NAMES))
