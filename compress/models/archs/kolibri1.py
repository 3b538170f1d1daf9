"""Kolibri 1 (Aleph Alpha, 2026): norms of each head of q and k, positions encoded in layers with a window
only, four norms a layer, and in every layer a shared expert and others, chosen by the logits of the router
and a bias that their weights, which are sigmoids, do not have."""

from typing import Any

from compress.models.archs.glm4_moe import MIXTURE_MODULES
from compress.models.family import FAMILIES, Family
from compress.models.layer_types import SLIDING, every_nth_full, layer_types, windows_by_layer_type
from compress.models.mixture import AS_IN_MEMORY, BARE, Mixture, apart, in_one
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

FULL_PERIOD = 5
"""Every fifth layer has full attention where no config states types of layers."""
_FIELDS = {
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "shared_size": "shared_expert_intermediate_size",
    "renormalize": "norm_topk_prob",
}
_IN_MEMORY = {
    "attn_post_norm": "post_self_attn_layernorm",
    "ffn_post_norm": "post_mlp_layernorm",
    "moe.selection_bias": MIXTURE_MODULES["moe.selection_bias"],
}


def _rotated_layers(config: Fields, num_layers: int) -> list[bool]:
    """Return which layers encode positions: those of the type with a window. Refuse a config without a
    window: `transformers` refuses it where a layer has one, and else encodes positions in all layers."""
    if not config.has("sliding_window"):
        raise config.wrong("sliding_window", None, "a number of positions")
    return [kind == SLIDING for kind in layer_types(config, num_layers)]


def _types_of_layers(config: Fields) -> dict[str, Any]:
    return every_nth_full(config, FULL_PERIOD)


FAMILIES.add(
    "kolibri1",
    Family(
        model_type="kolibri1",
        architecture="Kolibri1ForCausalLM",
        qk_norm=True,
        windows=windows_by_layer_type,
        rotated_layers=_rotated_layers,
        facts=lambda config: {"block": "sandwich"},
        implied=_types_of_layers,
        mixture=Mixture(_FIELDS, facts={"score": "sigmoid", "selection_bias": True, "biased_logits": True}),
        layer_modules={
            **LAYER_MODULES,
            **MIXTURE_MODULES,
            "attn_post_norm": "post_attn_norm",
            "ffn_post_norm": "post_ffn_norm",
            "moe.selection_bias": "moe.router.expert_bias",
        },
        expert_layouts=(
            apart("mlp.experts"),
            in_one(
                AS_IN_MEMORY.modules["moe.experts.*.gate"],
                AS_IN_MEMORY.modules["moe.experts.*.down"],
                suffixes=BARE,
                modules=_IN_MEMORY,
            ),
        ),
        known_fields=frozenset({*_FIELDS.values(), "sliding_window", "layer_types"}),
        aliases={"num_experts": "num_local_experts"},
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "sliding_window": 513,
            "num_experts": 384,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": False,
        },
    ),
)
