"""Granite 4 (IBM, 2025): Granite's four multipliers around attention and an FFN whose gate and up are one
tensor, or experts and a shared one. In models named H most layers have a Mamba-2 mixer in place of
attention."""

from typing import Any

from compress.errors import UnsupportedArch
from compress.models.archs.granitemoe import (
    DEFAULTS,
    EXPERT_FIELDS,
    LAYOUTS,
    MODULES,
    MULTIPLIERS,
    multipliers,
)
from compress.models.experts import MAX_EXPERTS
from compress.models.family import FAMILIES, Family
from compress.models.layer_types import FULL, LINEAR
from compress.models.limits import MAX_LAYERS
from compress.models.mamba2_config import (
    MAMBA_DEFAULTS,
    MAMBA_FIELDS,
    MAMBA_FIXED,
    MAMBA_MODULES,
    mamba2_of,
)
from compress.models.mixture import Mixture, apart
from compress.untrusted.fields import Fields

_TYPES = {"attention": FULL, FULL: FULL, "mamba": LINEAR, LINEAR: LINEAR}
_OLDER = "layers_block_type"


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of the layers in the standard spelling; a config that states none has Mamba-2 in all.

    Raises:
        UnsupportedArch: a layer has another type.
    """
    name = _OLDER if config.has(_OLDER) else "layer_types"
    stated = config.texts(name, default=("mamba",) * config.integer("num_hidden_layers", 1, MAX_LAYERS))
    if others := sorted({*stated} - {*_TYPES}):
        raise UnsupportedArch(
            f"{config.where} has layers of the type {', '.join(others)} ({name}); the decoder has "
            f"{', '.join(_TYPES)}."
        )
    return {"layer_types": [_TYPES[each] for each in stated]}


def _rotated_layers(config: Fields, num_layers: int) -> list[bool]:
    rotates = config.text("position_embedding_type", default="nope") == "rope"
    return [rotates] * num_layers


def _has_experts(config: Fields, num_layers: int) -> list[bool]:
    return [config.integer("num_local_experts", 0, MAX_EXPERTS) > 0] * num_layers


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
        recurrence=mamba2_of,
        mixture=Mixture(
            {**EXPERT_FIELDS, "shared_size": "shared_intermediate_size"},
            facts={"score": "softmax_topk"},
            is_sparse=_has_experts,
        ),
        layer_modules={
            **MODULES,
            **MAMBA_MODULES,
            **{
                f"{half}.{linear}": f"shared_mlp.{name}_linear"
                for half in ("ffn", "moe.shared")
                for linear, name in {"gate": "input", "up": "input", "down": "output"}.items()
            },
        },
        expert_layouts=(
            *LAYOUTS,
            apart("block_sparse_moe.experts", methods=("compressed-tensors",)),
        ),
        known_fields=MAMBA_FIELDS
        | frozenset(
            {
                *MULTIPLIERS,
                "attention_bias",
                "shared_intermediate_size",
                "position_embedding_type",
                "layer_types",
                _OLDER,
                "num_local_experts",
                "num_experts_per_tok",
            }
        ),
        fixed_fields=MAMBA_FIXED,
        defaults={**DEFAULTS, **MAMBA_DEFAULTS, "shared_intermediate_size": 1024},
    ),
)
