"""Hunyuan-A13B (Tencent, 2025): the dense Hunyuan with experts, chosen by the softmax of the router, and one
that every token goes through, all of one width."""

from typing import Any

from compress.models.archs.hunyuan_v1_dense import (
    HUNYUAN_DEFAULTS,
    HUNYUAN_FIELDS,
    HUNYUAN_FIXED,
    HUNYUAN_MODULES,
    hunyuan_implied,
)
from compress.models.experts import MAX_EXPERT_SIZE, MAX_EXPERTS
from compress.models.family import FAMILIES, Family
from compress.models.limits import MAX_LAYERS
from compress.models.mixture import AS_IN_MEMORY, Mixture, apart
from compress.untrusted.fields import Fields

_SAME_IN_ALL = {
    "num_experts": MAX_EXPERTS,
    "moe_topk": MAX_EXPERTS,
    "num_shared_expert": MAX_EXPERTS,
    "moe_intermediate_size": MAX_EXPERT_SIZE,
}
"""Fields that may have an entry for each layer -> their largest values."""


def _implied(config: Fields) -> dict[str, Any]:
    """Return what a dense Hunyuan implies, and as single numbers what is listed for each layer."""
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    single: dict[str, Any] = {}
    for name, most in _SAME_IN_ALL.items():
        if not config.is_list(name):
            continue
        values = config.integers(name, 0, most)
        if len(values) < num_layers or len(set(values[:num_layers])) != 1:
            raise config.wrong(name, values, f"one number for all {num_layers} layers")
        single[name] = values[0]
    return hunyuan_implied(config) | single


def _of_one_width(config: Fields) -> dict[str, Any]:
    """Return the width of the shared expert. `transformers` reads `intermediate_size` for all experts, and
    other programs read `moe_intermediate_size`, which has to be the same."""
    size = config.integer("intermediate_size", 1, MAX_EXPERT_SIZE)
    for name, wanted in {"moe_intermediate_size": size, "num_shared_expert": 1}.items():
        stated = config.integer(name, 0, MAX_EXPERT_SIZE, default=wanted)
        if stated != wanted:
            raise config.wrong(name, stated, str(wanted))
    return {"shared_size": size}


FAMILIES.add(
    "hunyuan_v1_moe",
    Family(
        model_type="hunyuan_v1_moe",
        architecture="HunYuanMoEV1ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        facts=lambda config: {"rotates_first": True},
        implied=_implied,
        mixture=Mixture(
            {"num_experts": "num_experts", "top_k": "moe_topk", "expert_size": "intermediate_size"},
            facts={"renormalize": True},
            read_more=_of_one_width,
        ),
        layer_modules={
            **HUNYUAN_MODULES,
            "moe.router": "mlp.gate.wg",
            "moe.shared.gate": "mlp.shared_mlp.gate_proj",
            "moe.shared.up": "mlp.shared_mlp.up_proj",
            "moe.shared.down": "mlp.shared_mlp.down_proj",
        },
        expert_layouts=(apart("mlp.experts"), AS_IN_MEMORY),
        known_fields=HUNYUAN_FIELDS | _SAME_IN_ALL.keys(),
        fixed_fields={**HUNYUAN_FIXED, "use_mixed_mlp_moe": True, "norm_topk_prob": True},
        aliases={"moe_topk": "num_experts_per_tok", "num_experts": "num_local_experts"},
        defaults={**HUNYUAN_DEFAULTS, "num_experts": 1, "moe_topk": 1},
    ),
)
