"""LFM2's mixtures of experts (Liquid AI, 2025): the first layers have a dense FFN, the others experts chosen
by the sigmoids of the router with a bias that their weights do not have."""

from functools import partial
from typing import Any

from compress.models.archs.lfm2 import (
    ALIASES,
    CONV_FIELDS,
    CONV_FIXED,
    DEFAULTS,
    MODULES,
    OUTER,
    SPELLED,
    short_conv_of,
    standard_types,
)
from compress.models.family import FAMILIES, Family
from compress.models.mixture import (
    AS_IN_MEMORY,
    BARE,
    Mixture,
    apart,
    in_one,
    sparse_after_first,
    state_first,
)
from compress.untrusted.fields import Fields

_DENSE = "num_dense_layers"
_BIAS = "use_expert_bias"
_FIELDS = {
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "renormalize": "norm_topk_prob",
    "scale": "routed_scaling_factor",
}


def _selection(config: Fields) -> dict[str, Any]:
    return {"selection_bias": config.flag(_BIAS)}


FAMILIES.add(
    "lfm2_moe",
    Family(
        model_type="lfm2_moe",
        architecture="Lfm2MoeForCausalLM",
        qk_norm=True,
        recurrence=short_conv_of,
        implied=standard_types,
        spelled=SPELLED,
        aliases=ALIASES,
        mixture=Mixture(
            _FIELDS,
            facts={"score": "sigmoid"},
            is_sparse=partial(sparse_after_first, field=_DENSE),
            state_sparse=partial(state_first, field=_DENSE),
            read_more=_selection,
        ),
        outer_modules=OUTER,
        layer_modules={
            **MODULES,
            "moe.router": "feed_forward.gate",
            "moe.selection_bias": "feed_forward.expert_bias",
        },
        expert_layouts=(
            apart("feed_forward.experts", ("w1", "w3", "w2")),
            in_one(
                AS_IN_MEMORY.modules["moe.experts.*.gate"].replace("mlp", "feed_forward"),
                AS_IN_MEMORY.modules["moe.experts.*.down"].replace("mlp", "feed_forward"),
                suffixes=BARE,
            ),
        ),
        known_fields=CONV_FIELDS | {*_FIELDS.values(), _DENSE, _BIAS},
        fixed_fields=CONV_FIXED,
        defaults={
            **DEFAULTS,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            _DENSE: 2,
            _BIAS: True,
        },
    ),
)
