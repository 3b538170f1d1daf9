"""Mixtures of experts of Cohere (North Mini Code, Command A+; 2026): the parallel halves of Command A with
LayerNorm or RMSNorm, and after dense layers experts that the largest logits choose. Layers without a window
encode no positions, but for dense ones in some configs."""

from typing import Any

from compress.models.experts import MAX_EXPERT_SIZE
from compress.models.family import FAMILIES, Family
from compress.models.layer_types import FULL, SLIDING, windows_by_layer_type
from compress.models.limits import MAX_LAYERS, SCALES
from compress.models.mixture import AS_IN_MEMORY, Mixture, apart, sparse_by_type_or_count, state_both
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

_FIELDS = {"num_experts": "num_experts", "top_k": "num_experts_per_tok", "expert_size": "intermediate_size"}
_PREFIX_PATTERN = "prefix_dense_sliding_window_pattern"
_DENSE_SIZE = "prefix_dense_intermediate_size"
_COMBINED = "shared_expert_combination_strategy"


def _facts(config: Fields) -> dict[str, Any]:
    is_rms = config.has("rms_norm_eps")
    return {
        "norm": "rms" if is_rms else "layer",
        "norm_eps": config.number("rms_norm_eps" if is_rms else "layer_norm_eps", 0, 1),
        "block": "parallel",
        "logit_scale": config.number("logit_scale", *SCALES),
    }


def _implied(config: Fields) -> dict[str, Any]:
    """Return the width of dense layers and the `layer_types` of a config that states none: each
    `sliding_window_pattern`-th layer sees everything, and the dense ones have a pattern of their own."""
    implied: dict[str, Any] = {}
    if not config.has(_DENSE_SIZE):
        implied[_DENSE_SIZE] = config.integer("intermediate_size", 1, MAX_EXPERT_SIZE)
    if config.has("layer_types"):
        return implied
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    num_dense = config.integer("first_k_dense_replace", 0, MAX_LAYERS, default=0)
    of_dense, of_others = (
        config.integer(name, 1, MAX_LAYERS) for name in (_PREFIX_PATTERN, "sliding_window_pattern")
    )
    full = [(idx + 1) % of_dense == 0 for idx in range(num_dense)]
    full += [(idx + 1) % of_others == 0 for idx in range(num_layers - num_dense)]
    return implied | {"layer_types": [FULL if each else SLIDING for each in full]}


def _rotated_layers(config: Fields, num_layers: int) -> list[bool]:
    windows = windows_by_layer_type(config, num_layers)
    of_dense = config.integer(_PREFIX_PATTERN, 1, MAX_LAYERS) == 1
    is_sparse = sparse_by_type_or_count(config, num_layers)
    return [
        window is not None or (of_dense and not sparse)
        for window, sparse in zip(windows, is_sparse, strict=True)
    ]


def _routing(config: Fields) -> dict[str, Any]:
    """Return how experts are weighed, and the shared ones, which are one FFN."""
    score = config.text("expert_selection_fn")
    if score not in ("softmax", "sigmoid"):
        raise config.wrong("expert_selection_fn", score, "softmax or sigmoid")
    combined = config.text(_COMBINED)
    if combined not in ("average", "sum"):
        raise config.wrong(_COMBINED, combined, "average or sum")
    size = config.integer("num_shared_experts", 0, 64) * config.integer(
        "intermediate_size", 1, MAX_EXPERT_SIZE
    )
    factor = 0.5 if size and combined == "average" else 1.0
    return {
        "score": "sigmoid" if score == "sigmoid" else "softmax_topk",
        "renormalize": score == "sigmoid" and config.flag("norm_topk_prob"),
        "scale": factor,
        "shared_size": size,
        "shared_scale": factor,
    }


FAMILIES.add(
    "cohere2_moe",
    Family(
        model_type="cohere2_moe",
        architecture="Cohere2MoeForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        windows=windows_by_layer_type,
        rotated_layers=_rotated_layers,
        facts=_facts,
        implied=_implied,
        interleaved_rotary=True,
        dense_size=_DENSE_SIZE,
        mixture=Mixture(
            _FIELDS, is_sparse=sparse_by_type_or_count, state_sparse=state_both, read_more=_routing
        ),
        layer_modules={
            **{name: disk for name, disk in LAYER_MODULES.items() if name != "ffn_norm"},
            "moe.router": "mlp.gate",
            "moe.shared.gate": "mlp.shared_experts.gate_proj",
            "moe.shared.up": "mlp.shared_experts.up_proj",
            "moe.shared.down": "mlp.shared_experts.down_proj",
        },
        expert_layouts=(apart("mlp.experts"), AS_IN_MEMORY),
        known_fields=frozenset(
            {
                *_FIELDS.values(),
                _PREFIX_PATTERN,
                _COMBINED,
                "attention_bias",
                "logit_scale",
                "layer_norm_eps",
                "sliding_window",
                "sliding_window_pattern",
                "layer_types",
                "mlp_layer_types",
                "first_k_dense_replace",
                _DENSE_SIZE,
                "num_shared_experts",
                "expert_selection_fn",
                "norm_topk_prob",
            }
        ),
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "layer_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "head_dim": 128,
            "max_position_embeddings": 8192,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "logit_scale": 0.0625,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_shared_experts": 0,
            _COMBINED: "average",
            "expert_selection_fn": "softmax",
            "norm_topk_prob": True,
            "first_k_dense_replace": 0,
            _PREFIX_PATTERN: 1,
        },
    ),
)
