"""Granite 4 without Mamba layers (IBM, 2025): Granite's four multipliers around attention and one FFN, whose
gate and up are one tensor. The models named H, which have Mamba layers, and experts of this family are
refused."""

from typing import Any

from compress.errors import UnsupportedArch
from compress.models.archs.granitemoe import MULTIPLIERS, multipliers
from compress.models.config_facts import TRAINING_OF_ROUTERS
from compress.models.experts import MAX_EXPERTS
from compress.models.family import FAMILIES, Family
from compress.models.layer_types import FULL
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

_ATTENTION = (FULL, "attention")
_OF_MAMBA = frozenset(
    {
        "mamba_chunk_size",
        "mamba_conv_bias",
        "mamba_d_conv",
        "mamba_d_head",
        "mamba_d_state",
        "mamba_expand",
        "mamba_n_groups",
        "mamba_n_heads",
        "mamba_proj_bias",
        "time_step_limit",
    }
)
"""Fields that Mamba layers alone read."""


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of the layers in the standard spelling.

    Raises:
        UnsupportedArch: the model has Mamba layers or experts.
    """
    name = "layers_block_type" if config.has("layers_block_type") else "layer_types"
    stated = config.texts(name, default=())
    if others := sorted({*stated} - {*_ATTENTION}) or ([] if stated else ["mamba"]):
        raise UnsupportedArch(
            f"{config.where} has layers of the type {', '.join(others)} ({name}); the decoder lacks all but "
            "attention."
        )
    num_experts = config.integer("num_local_experts", 0, MAX_EXPERTS)
    if num_experts > 0:
        raise config.wrong("num_local_experts", num_experts, "0: its decoder has no experts here")
    return {"layer_types": [FULL] * len(stated)}


def _rotated_layers(config: Fields, num_layers: int) -> list[bool]:
    rotates = config.text("position_embedding_type", default="nope") == "rope"
    return [rotates] * num_layers


FAMILIES.add(
    "granitemoehybrid",
    Family(
        model_type="granitemoehybrid",
        architecture="GraniteMoeHybridForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        rotated_layers=_rotated_layers,
        facts=multipliers,
        dense_size="shared_intermediate_size",
        implied=_implied,
        layer_modules={
            **LAYER_MODULES,
            "ffn.gate": "shared_mlp.input_linear",
            "ffn.up": "shared_mlp.input_linear",
            "ffn.down": "shared_mlp.output_linear",
        },
        known_fields=_OF_MAMBA
        | frozenset(
            {
                *MULTIPLIERS,
                "attention_bias",
                "shared_intermediate_size",
                "position_embedding_type",
                "layer_types",
                "layers_block_type",
                "num_local_experts",
                "num_experts_per_tok",
                *TRAINING_OF_ROUTERS,
            }
        ),
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 2048,
            "shared_intermediate_size": 1024,
            "num_local_experts": 8,
        },
    ),
)
