"""DeepSeek-OCR 2 (arXiv 2601.20552): the text model has the experts of DeepSeek-V2 and attention without
latents. Its vision tower is SAM and a language model of its own, which stay as they are."""

from dataclasses import replace

from compress.models.archs.deepseek_v2 import DEEPSEEK_V2, V2_MIXTURE
from compress.models.family import FAMILIES
from compress.models.family_hooks import nothing_implied
from compress.models.latent_config import LATENT_FIELDS, LATENT_MODULES
from compress.models.mixture import FIRST_DENSE, sparse_by_type, state_types
from compress.models.module_names import LAYER_MODULES
from compress.models.wrapper import wrapper
from compress.untrusted.fields import Fields

_TYPES = "mlp_layer_types"
_LATENT = {*LATENT_FIELDS, FIRST_DENSE}


def _is_sparse(config: Fields, num_layers: int) -> list[bool]:
    """Return which layers have experts, by the types of their FFNs.

    Raises:
        UnsupportedArch: the config states no types; `transformers` has no default for them.
    """
    config.texts(_TYPES)
    return sparse_by_type(config, num_layers)


_MODULES = {name: disk for name, disk in DEEPSEEK_V2.layer_modules.items() if name not in LATENT_MODULES}
_TEXT = replace(
    DEEPSEEK_V2,
    model_type="deepseek_ocr2_text",
    latent=None,
    implied=nothing_implied,
    mixture=replace(V2_MIXTURE, is_sparse=_is_sparse, state_sparse=state_types),
    layer_modules={**LAYER_MODULES, **_MODULES},
    known_fields=(DEEPSEEK_V2.known_fields - {FIRST_DENSE, "auto_map"}) | {_TYPES},
    defaults={name: value for name, value in DEEPSEEK_V2.defaults.items() if name not in _LATENT},
)
_ON_DISK = ("sam_model", "qwen2_model", "projector", "view_seperator")
# `transformers` renames tensors of these parts; those that it saved so stay as they are.
_IN_MEMORY = ("vision_tower", "multi_modal_projector", "view_separator")

FAMILIES.add(
    "deepseek_ocr2",
    wrapper(
        "deepseek_ocr2",
        "DeepseekOcr2ForConditionalGeneration",
        _TEXT,
        in_memory={
            f"model.{part}": f"model.language_model.{part}" for part in ("layers.", "embed_tokens.", "norm.")
        },
        untouched=tuple(f"model.{part}" for part in (*_ON_DISK, *_IN_MEMORY)),
    ),
)
