"""ERNIE 4.5 VL mixtures of experts (Baidu, 2025): text goes to the first half of a layer's experts, with a
router of its own, and images to the others, which stay untouched. The rope has sections for the height, width
and time of a token, the first two in turns: equal positions, those of text, make it the plain rope."""

from dataclasses import replace
from typing import Any

from compress.models.archs.ernie4_5_moe import ERNIE4_5_MOE
from compress.models.experts import MAX_EXPERT_SIZE
from compress.models.family import FAMILIES
from compress.models.mixture import Mixture, apart, sparse_by_both, state_types
from compress.models.rope_config import rope_of_text
from compress.models.wrapper import sized, wrapper
from compress.untrusted.fields import Fields

_BIASES = "mlp.moe_statics.e_score_correction_bias"
_SIZES = "moe_intermediate_size"
_SHARED = "moe_num_shared_experts"
_OF_RANGES = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")


def _implied(config: Fields) -> dict[str, Any]:
    """Return the rope of text, which can be the plain one only."""
    implied = rope_of_text(config)
    rope = implied["rope_parameters"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise config.wrong("rope_type", kind, "default in this family")
    return implied


def _widths(config: Fields) -> dict[str, Any]:
    """Return the width of an expert of text, the first of two, and that of the shared ones, which are one
    FFN."""
    sizes = config.integers(_SIZES, 1, MAX_EXPERT_SIZE)
    if len(sizes) != 2:
        raise config.wrong(_SIZES, list(sizes), "the widths of the experts of text and of images")
    return {"expert_size": sizes[0], "shared_size": sizes[0] * config.integer(_SHARED, 0, 64)}


_TEXT = sized(
    replace(
        ERNIE4_5_MOE,
        model_type="ernie4_5_vl_moe_text",
        implied=_implied,
        mixture=Mixture(
            {"num_experts": "moe_num_experts", "top_k": "moe_k"},
            facts={"selection_bias": True, "renormalize": True},
            is_sparse=sparse_by_both,
            state_sparse=state_types,
            read_more=_widths,
        ),
        in_one_row=frozenset(),
        transposed=frozenset({"moe.router"}),
        first_rows={"moe.selection_bias": 2},
        untouched_in_layers=("mlp.gate.weight_1", _BIASES),
        more_experts=True,
        expert_layouts=(apart("mlp.experts"),),
        known_fields=(ERNIE4_5_MOE.known_fields - {*_OF_RANGES}) | {"mlp_layer_types"},
        defaults={
            **{name: each for name, each in ERNIE4_5_MOE.defaults.items() if name not in _OF_RANGES},
            _SIZES: [1536, 512],
        },
        ignored_tensors=r"rotary_emb\.inv_freq$|^model\.mtp_",
    ),
    vocab_size=103424,
    hidden_size=2560,
    num_hidden_layers=28,
    num_attention_heads=20,
)

FAMILIES.add(
    "ernie4_5_vl_moe",
    wrapper(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeForConditionalGeneration",
        _TEXT,
        ties_by_default=True,
        layers_are_numbered=True,
        in_memory={
            "model.vision_model.": "model.vision_tower.",
            "model.layers.": "model.language_model.layers.",
            "model.embed_tokens.": "model.language_model.embed_tokens.",
            "model.norm.": "model.language_model.norm.",
        },
        untouched=("model.vision_model", "model.resampler_model"),
    ),
)
