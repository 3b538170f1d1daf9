"""HyperCLOVA X SEED Think 32B with its vision tower (NAVER, 2025): the text model is `hyperclovax`."""

from compress.models.archs.hyperclovax import HYPERCLOVAX
from compress.models.family import FAMILIES
from compress.models.wrapper import wrapper

_INSIDE = "model.language_model."

HYPERCLOVAX_VISION_V2 = wrapper(
    "hyperclovax_vision_v2",
    "HyperCLOVAXVisionV2ForConditionalGeneration",
    HYPERCLOVAX,
    ties_by_default=True,
    other_names=("HCXVisionV2ForCausalLM",),
    layer_prefix=f"{_INSIDE}model.layers.",
    outer_modules={
        "embed": f"{_INSIDE}model.embed_tokens",
        "norm": f"{_INSIDE}model.norm",
        "head": f"{_INSIDE}lm_head",
    },
    in_memory={
        **{f"{_INSIDE}model.{part}": f"{_INSIDE}{part}" for part in ("layers.", "embed_tokens.", "norm.")},
        f"{_INSIDE}lm_head": "lm_head",
        "model.vision_projector.": "model.projector.",
    },
    untouched=("model.vision_model", "model.vision_projector", "model.mm_projector"),
)

FAMILIES.add("hyperclovax_vision_v2", HYPERCLOVAX_VISION_V2)
