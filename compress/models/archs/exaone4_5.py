"""EXAONE 4.5 (LG AI Research, 2026): the text model is EXAONE 4, also by its first name `exaone4_5_text`. The
layer that predicts a further token has the shape of the first one (`mtp.py`), as in vLLM."""

from dataclasses import replace

from compress.models.arch import Arch
from compress.models.archs.exaone4 import EXAONE4
from compress.models.family import FAMILIES
from compress.models.layer_shape import LayerShape
from compress.models.mtp_names import IN_MTP
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, wrapper


def _shape_of_mtp(target: Arch) -> LayerShape:
    """Return the shape of the layer that predicts a further token."""
    return target.layers[0]


FAMILIES.add(
    "exaone4_5",
    wrapper(
        "exaone4_5",
        "Exaone4_5_ForConditionalGeneration",
        EXAONE4,
        text_families={"exaone4": EXAONE4, "exaone4_5_text": EXAONE4},
        ignored_tensors=r"rotary_emb\.inv_freq$|^mtp\.",
        mtp=replace(IN_MTP, shape=_shape_of_mtp),
        **LANGUAGE_MODEL_NAMES,
    ),
)
