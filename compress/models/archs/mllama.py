"""Llama 3.2 Vision (arXiv 2407.21783): Llama 3.1 with further layers between its own that attend to an image.
They do nothing without one, and stay untouched. The embedding has rows of 8 tokens more than the head."""

from dataclasses import replace
from typing import Any

from compress.models.arch import Arch
from compress.models.archs.llama import LLAMA
from compress.models.family import FAMILIES
from compress.models.limits import MAX_LAYERS
from compress.models.wrapper import LLAVA_NAMES, wrapper
from compress.untrusted.fields import Fields

_LAYERS = "cross_attention_layers"
_NUM_LAYERS = "num_hidden_layers"


def _implied(config: Fields) -> dict[str, Any]:
    """Return the number of layers without those of images.

    Raises:
        UnsupportedArch: a layer of images is no layer of the model, or is listed twice.
    """
    num_layers = config.integer(_NUM_LAYERS, 1, MAX_LAYERS)
    of_images = config.integers(_LAYERS, 0, MAX_LAYERS)
    if len(set(of_images)) < len(of_images) or max(of_images, default=0) >= num_layers:
        raise config.wrong(_LAYERS, of_images, f"different layers of 0..{num_layers - 1}")
    if len(of_images) == num_layers:
        raise config.wrong(_LAYERS, of_images, "some of the layers: the others are those of text")
    return {_NUM_LAYERS: num_layers - len(of_images)}


def _restated(arch: Arch) -> dict[str, Any]:
    """Return the number of all layers."""
    of_images = arch.config.get(_LAYERS, TEXT.defaults[_LAYERS])
    return {_NUM_LAYERS: arch.num_layers + len(of_images)}


TEXT = replace(
    LLAMA,
    model_type="mllama_text_model",
    architecture="MllamaForCausalLM",
    qkv_bias=False,
    o_bias=False,
    ffn_bias=False,
    heads_span_hidden=True,
    derives_head_dim=True,
    implied=_implied,
    restated=_restated,
    known_fields=frozenset({_LAYERS, "dropout"}),
    fixed_fields={"tie_word_embeddings": False},
    defaults={
        "vocab_size": 128256,
        "hidden_size": 4096,
        "hidden_act": "silu",
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        _LAYERS: [3, 8, 13, 18, 23, 28, 33, 38],
    },
)

FAMILIES.add(
    "mllama",
    wrapper(
        "mllama",
        "MllamaForConditionalGeneration",
        TEXT,
        layers_of_images=_LAYERS,
        passed_modules=("cross_attn", "mlp"),
        more_embeddings=8,
        **{
            **LLAVA_NAMES,
            "in_memory": {
                "language_model.model.": "model.language_model.",
                "language_model.lm_head": "lm_head",
                "vision_model.": "model.vision_model.",
                "multi_modal_projector.": "model.multi_modal_projector.",
            },
            "untouched": ("vision_model", "multi_modal_projector"),
        },
    ),
)
