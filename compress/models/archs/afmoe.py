"""Trinity (arXiv 2602.17004): attention with an output gate, norms of each head of q and k, four norms a
layer, positions encoded in layers with a window only, and after dense layers experts chosen by the sigmoids
of the router with a bias that their weights do not have."""

from functools import partial
from typing import Any

from compress.models.config_facts import only_own_code
from compress.models.family import FAMILIES, Family
from compress.models.layer_types import SLIDING, every_nth_full, layer_types, windows_by_layer_type
from compress.models.limits import MAX_LAYERS, MAX_SIZE
from compress.models.mixture import (
    AS_IN_MEMORY,
    Mixture,
    apart,
    shared_of,
    sparse_after_first,
    state_first,
)
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

_NUM_DENSE = "num_dense_layers"
_NUM_SHARED = "num_shared_experts"
_FIELDS = {
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "scale": "route_scale",
}


def _facts(config: Fields) -> dict[str, Any]:
    scaled = config.flag("mup_enabled", default=False)
    width = config.integer("hidden_size", 1, MAX_SIZE)
    return {"block": "sandwich", "embed_scale": width**0.5 if scaled else 1.0}


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of the layers of a config that states none. Refuse an `auto_map` to other code than
    the model's own from before it was in `transformers`."""
    only_own_code(config, ("AfmoeConfig", "AfmoeModel", "AfmoeForCausalLM"))
    return every_nth_full(config, config.integer("global_attn_every_n_layers", 1, MAX_LAYERS))


def _rotated_layers(config: Fields, num_layers: int) -> list[bool]:
    """Return which layers encode positions: those of the type with a window, which they need to have."""
    rotated = [kind == SLIDING for kind in layer_types(config, num_layers)]
    if any(rotated) and not config.has("sliding_window"):
        raise config.wrong("sliding_window", None, "a number of positions where layers have a window")
    return rotated


FAMILIES.add(
    "afmoe",
    Family(
        model_type="afmoe",
        architecture="AfmoeForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        output_gate=True,
        windows=windows_by_layer_type,
        rotated_layers=_rotated_layers,
        facts=_facts,
        implied=_implied,
        mixture=Mixture(
            _FIELDS,
            facts={"score": "sigmoid", "selection_bias": True, "renormalize": True},
            is_sparse=partial(sparse_after_first, field=_NUM_DENSE),
            state_sparse=partial(state_first, field=_NUM_DENSE),
            read_more=shared_of(_NUM_SHARED),
        ),
        layer_modules={
            **LAYER_MODULES,
            "attn.gate": "self_attn.gate_proj",
            "attn_post_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "ffn_post_norm": "post_mlp_layernorm",
            "moe.router": "mlp.router.gate",
            "moe.selection_bias": "mlp.expert_bias",
            "moe.shared.gate": "mlp.shared_experts.gate_proj",
            "moe.shared.up": "mlp.shared_experts.up_proj",
            "moe.shared.down": "mlp.shared_experts.down_proj",
        },
        expert_layouts=(apart("mlp.experts"), AS_IN_MEMORY),
        known_fields=frozenset(
            {
                *_FIELDS.values(),
                _NUM_DENSE,
                _NUM_SHARED,
                "attention_bias",
                "sliding_window",
                "global_attn_every_n_layers",
                "layer_types",
                "mup_enabled",
                "auto_map",
                "use_grouped_mm",
                "load_balance_coeff",
            }
        ),
        fixed_fields={
            "score_func": "sigmoid",
            "route_norm": True,
            "n_group": 1,
            "topk_group": 1,
            "num_expert_groups": 1,
            "num_limited_groups": 1,
        },
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "head_dim": 128,
            "intermediate_size": 6144,
            "max_position_embeddings": 16384,
            "sliding_window": 1024,
            "global_attn_every_n_layers": 4,
            _NUM_DENSE: 1,
            _NUM_SHARED: 2,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "route_scale": 1.0,
            "mup_enabled": False,
        },
    ),
)
