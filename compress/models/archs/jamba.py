"""Jamba (AI21, arXiv 2403.19887), Jamba 1.5 (arXiv 2408.12570) and later: most layers have a Mamba-1 mixer in
place of attention, which encodes no positions, and in most models some have experts in place of the FFN.

Layers with attention and layers with experts recur with a period each.
"""

from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.experts import MAX_EXPERTS
from compress.models.family import FAMILIES, Family
from compress.models.layer_types import FULL, LINEAR, no_layer
from compress.models.limits import MAX_LAYERS
from compress.models.mamba1_config import (
    MAMBA1_DEFAULTS,
    MAMBA1_FIELDS,
    MAMBA1_FIXED,
    MAMBA1_MODULES,
    mamba1_of,
)
from compress.models.mixture import BARE, Mixture, apart, in_one
from compress.models.module_names import LAYER_MODULES, OUTER_MODULES
from compress.untrusted.fields import Fields

_ATTENTION = "attn_layer"
_EXPERTS = "expert_layer"
_PERIODS = tuple(f"{kind}_{fact}" for kind in (_ATTENTION, _EXPERTS) for fact in ("period", "offset"))


def _recurring(config: Fields, kind: str, num_layers: int) -> list[bool]:
    """Return which layers are of a kind that recurs: every so many layers, after an offset."""
    period = config.integer(f"{kind}_period", 1, MAX_LAYERS)
    offset = config.integer(f"{kind}_offset", 0, period - 1)
    return [idx % period == offset for idx in range(num_layers)]


def _stated(kind: str, are: list[bool], what: str) -> dict[str, Any]:
    """Return the fields that state which layers are of a kind that recurs.

    Raises:
        UnsupportedArch: they do not recur.
    """
    num_layers = len(are)
    offset = are.index(True) if True in are else num_layers
    for period in range(offset + 1, max(offset, num_layers) + 2):
        if are == [idx % period == offset for idx in range(num_layers)]:
            return {f"{kind}_period": period, f"{kind}_offset": offset}
    places = ", ".join(str(idx) for idx, each in enumerate(are) if each)
    raise UnsupportedArch(
        f"of {num_layers} layers those with {what} are {places}; a config of jamba states layers that recur "
        "with a period: remove other layers."
    )


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of the layers in the standard spelling."""
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    attending = _recurring(config, _ATTENTION, num_layers)
    return {"layer_types": [FULL if each else LINEAR for each in attending]}


def _restated(arch: Arch) -> dict[str, Any]:
    """Return the periods and the offsets of layers with attention and with experts where the config states
    others.

    Raises:
        UnsupportedArch: no period states them, or a mixture has one expert, which is read as an FFN.
    """
    experts = [layer.experts for layer in arch.layers]
    if any(each is not None and each.num_experts == 1 for each in experts):
        raise UnsupportedArch(
            "layers have a mixture of one expert, which readers of a config of jamba take for an FFN: keep "
            "two experts or more."
        )
    config = Fields({**JAMBA.defaults, **arch.config}, "the source's config", UnsupportedArch)
    fields: dict[str, Any] = {}
    attending = [layer.attends for layer in arch.layers]
    if _recurring(config, _ATTENTION, arch.num_layers) != attending:
        fields |= _stated(_ATTENTION, attending, "attention")
    are_sparse = [each is not None for each in experts]
    if _has_experts(config, arch.num_layers) != are_sparse:
        fields |= _stated(_EXPERTS, are_sparse, "experts")
    return fields


def _has_experts(config: Fields, num_layers: int) -> list[bool]:
    """Return which layers have experts; none where the model has a single expert, which is an FFN then."""
    if config.integer("num_experts", 1, MAX_EXPERTS) == 1:
        return [False] * num_layers
    return _recurring(config, _EXPERTS, num_layers)


_MIXTURE = Mixture(
    {"num_experts": "num_experts", "top_k": "num_experts_per_tok", "expert_size": "intermediate_size"},
    is_sparse=_has_experts,
)

JAMBA = Family(
    model_type="jamba",
    architecture="JambaForCausalLM",
    rotated_layers=no_layer,
    implied=_implied,
    restated=_restated,
    recurrence=mamba1_of,
    mixture=_MIXTURE,
    outer_modules={**OUTER_MODULES, "norm": "model.final_layernorm"},
    layer_modules={
        **{name: module.replace("mlp.", "feed_forward.") for name, module in LAYER_MODULES.items()},
        "ffn_norm": "pre_ff_layernorm",
        "moe.router": "feed_forward.router",
        **MAMBA1_MODULES,
    },
    expert_layouts=(
        apart("feed_forward.experts"),
        in_one("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj", suffixes=BARE),
    ),
    known_fields=MAMBA1_FIELDS | frozenset({*_PERIODS, "num_experts", "num_experts_per_tok"}),
    fixed_fields=MAMBA1_FIXED,
    defaults={
        **MAMBA1_DEFAULTS,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 262144,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
)

FAMILIES.add("jamba", JAMBA)
