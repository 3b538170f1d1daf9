"""Idefics 3 and the first SmolVLM (arXiv 2408.12637): the text model is `llama`."""

from compress.models.archs.llava import LLAMA_7B
from compress.models.family import FAMILIES
from compress.models.wrapper import wrapper

IDEFICS3 = wrapper(
    "idefics3",
    "Idefics3ForConditionalGeneration",
    LLAMA_7B,
    layer_prefix="model.text_model.layers.",
    outer_modules={
        "embed": "model.text_model.embed_tokens",
        "norm": "model.text_model.norm",
        "head": "lm_head",
    },
    untouched=("model.vision_model", "model.connector"),
)

FAMILIES.add("idefics3", IDEFICS3)
