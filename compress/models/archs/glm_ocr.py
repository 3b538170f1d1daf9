"""GLM-OCR (Z.ai, arXiv 2603.10910): the text model is that of GLM-4.1V without biases, and with heads of any
size. The layer that predicts a further token comes after the last (`mtp.py`)."""

from dataclasses import replace

from compress.models.archs.glm4v import TEXT
from compress.models.family import FAMILIES
from compress.models.mtp_names import AFTER_LAST
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, sized, wrapper

_TEXT = sized(
    replace(
        TEXT,
        model_type="glm_ocr_text",
        qkv_bias=False,
        heads_span_hidden=False,
        known_fields=TEXT.known_fields | {"num_nextn_predict_layers"},
        fixed_fields={"attention_bias": False},
    ),
    vocab_size=59392,
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=131072,
)

FAMILIES.add(
    "glm_ocr",
    wrapper(
        "glm_ocr",
        "GlmOcrForConditionalGeneration",
        _TEXT,
        text_ties=True,
        mtp=replace(AFTER_LAST, in_vllm=("model.language_model.layers.{index}", "model.layers.{index}")),
        **LANGUAGE_MODEL_NAMES,
    ),
)
