"""EXAONE 4.5 (LG AI Research, 2026): the text model is EXAONE 4, also by its first name `exaone4_5_text`. The
layers that predict further tokens are not read."""

from compress.models.archs.exaone4 import EXAONE4
from compress.models.family import FAMILIES
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, wrapper

FAMILIES.add(
    "exaone4_5",
    wrapper(
        "exaone4_5",
        "Exaone4_5_ForConditionalGeneration",
        EXAONE4,
        text_families={"exaone4": EXAONE4, "exaone4_5_text": EXAONE4},
        ignored_tensors=r"rotary_emb\.inv_freq$|^mtp\.",
        **LANGUAGE_MODEL_NAMES,
    ),
)
