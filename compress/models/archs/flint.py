"""Flint (Recursive SI, 2026): Qwen3's experts chosen by the sigmoids of the router, one that every token goes
through, attention sinks, and positions encoded in layers with a window only."""

from dataclasses import replace
from typing import Any

from compress.models.archs.qwen3_moe import QWEN3_MOE
from compress.models.family import FAMILIES
from compress.models.layer_types import FULL, SLIDING, windows_by_layer_type
from compress.models.limits import MAX_LAYERS
from compress.models.mixture import AS_IN_MEMORY, Mixture, sparse_by_step, state_steps
from compress.untrusted.fields import Fields

_SHARED = "shared_expert_intermediate_size"
_FIELDS = {
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "shared_size": _SHARED,
    "renormalize": "norm_topk_prob",
}


def _implied(config: Fields) -> dict[str, Any]:
    """Return what a config does not state: the first two layers are dense, and attention is full in them, in
    every fourth layer after them and in the last."""
    implied: dict[str, Any] = {}
    if not config.has("mlp_only_layers"):
        implied["mlp_only_layers"] = [0, 1]
    if not config.has("layer_types"):
        num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
        is_full = [idx < 2 or idx % 4 == 1 or idx == num_layers - 1 for idx in range(num_layers)]
        implied["layer_types"] = [FULL if full else SLIDING for full in is_full]
    return implied


def _rotated_layers(config: Fields, num_layers: int) -> list[bool]:
    return [window is not None for window in windows_by_layer_type(config, num_layers)]


FAMILIES.add(
    "flint",
    replace(
        QWEN3_MOE,
        model_type="flint",
        architecture="FlintForCausalLM",
        windows=windows_by_layer_type,
        rotated_layers=_rotated_layers,
        facts=lambda config: {"attn_sinks": True},
        implied=_implied,
        mixture=Mixture(
            _FIELDS, facts={"score": "sigmoid"}, is_sparse=sparse_by_step, state_sparse=state_steps
        ),
        layer_modules={
            **QWEN3_MOE.layer_modules,
            "attn.sinks": "self_attn.softmax_offset",
            "moe.shared.gate": "mlp.shared_expert.gate_proj",
            "moe.shared.up": "mlp.shared_expert.up_proj",
            "moe.shared.down": "mlp.shared_expert.down_proj",
        },
        expert_layouts=(
            QWEN3_MOE.expert_layouts[0],
            replace(AS_IN_MEMORY, modules={**AS_IN_MEMORY.modules, "attn.sinks": "self_attn.sinks"}),
        ),
        aliases={},
        known_fields=frozenset(
            {
                *_FIELDS.values(),
                "attention_bias",
                "sliding_window",
                "layer_types",
                "decoder_sparse_step",
                "mlp_only_layers",
            }
        ),
        defaults={
            **{name: value for name, value in QWEN3_MOE.defaults.items() if name != "use_sliding_window"},
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "sliding_window": 513,
            "num_experts": 256,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 512,
            _SHARED: 1024,
            "norm_topk_prob": True,
        },
    ),
)
