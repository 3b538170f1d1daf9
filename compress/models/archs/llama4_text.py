"""Llama 4 (Meta, 2025), the text model: Scout and Maverick. Attention in chunks in three of four layers; the
fourth sees everything, encodes no positions, and its queries grow with the position. Neighbouring dimensions
of a head rotate as a pair, and heads of q and k may be normed without a weight. A router sends each token to
one expert and multiplies its input by the router's score; every token also goes through a shared expert."""

from typing import Any

from compress.models.family import FAMILIES, Family
from compress.models.layer_types import CHUNKED, FULL
from compress.models.limits import MAX_LAYERS, MAX_POSITIONS
from compress.models.mixture import BARE, Mixture, apart, in_one
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields


def _implied(config: Fields) -> dict[str, Any]:
    """Return which layers rotate (`no_rope_layers` has 1 for those that do), and their types."""
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    rotates = _rotated_layers(config, num_layers)
    implied: dict[str, Any] = {"no_rope_layers": [int(each) for each in rotates]}
    if not config.has("layer_types"):
        implied["layer_types"] = [CHUNKED if each else FULL for each in rotates]
    return implied


def _rotated_layers(config: Fields, num_layers: int) -> list[bool]:
    name = "no_rope_layers"
    stated = config.integers(name, 0, 1) if config.has(name) else []
    if not stated:
        interval = config.integer("no_rope_layer_interval", 1, MAX_LAYERS)
        return [idx % interval != 0 for idx in range(1, num_layers + 1)]
    if len(stated) < num_layers:
        raise config.wrong(name, stated, f"a list of {num_layers} numbers")
    return [each == 1 for each in stated[:num_layers]]


def _facts(config: Fields) -> dict[str, Any]:
    facts: dict[str, Any] = {"unit_qk_norm": config.flag("use_qk_norm")}
    name = "attn_temperature_tuning"  # the first files have 4 for true
    if config.integer(name, 0, MAX_POSITIONS) > 0 if config.is_integer(name) else config.flag(name):
        growth = config.number("attn_scale", 0, 1e6), config.integer("floor_scale", 1, MAX_POSITIONS)
        facts |= {"query_growth": growth, "growth_offset": 1, "growth_unrotated": True}
    return facts


def _is_sparse(config: Fields, num_layers: int) -> list[bool]:
    """Return which layers have experts: those listed, or every `interleave_moe_layer_step`-th."""
    if config.has("moe_layers"):
        listed = config.integers("moe_layers", 0, MAX_LAYERS)
        return [idx in listed for idx in range(num_layers)]
    step = config.integer("interleave_moe_layer_step", 1, MAX_LAYERS)
    return [idx % step == 0 for idx in range(1, num_layers + 1)]


def _state_sparse(is_sparse: list[bool]) -> dict[str, Any]:
    return {"moe_layers": [idx for idx, sparse in enumerate(is_sparse) if sparse]}


def _in_feed_forward(name: str) -> str:
    return name.replace("mlp.", "feed_forward.")


LLAMA4_TEXT = Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    rotated_layers=_rotated_layers,
    implied=_implied,
    facts=_facts,
    interleaved_rotary=True,
    dense_size="intermediate_size_mlp",
    mixture=Mixture(
        {
            "num_experts": "num_local_experts",
            "top_k": "num_experts_per_tok",
            "expert_size": "intermediate_size",
            "shared_size": "intermediate_size",
        },
        facts={"score": "sigmoid", "weighs_input": True},
        is_sparse=_is_sparse,
        state_sparse=_state_sparse,
    ),
    layer_modules={
        **{ours: _in_feed_forward(theirs) for ours, theirs in LAYER_MODULES.items()},
        "moe.router": "feed_forward.router",
        "moe.shared.gate": "feed_forward.shared_expert.gate_proj",
        "moe.shared.up": "feed_forward.shared_expert.up_proj",
        "moe.shared.down": "feed_forward.shared_expert.down_proj",
    },
    expert_layouts=(
        in_one(
            "feed_forward.experts.gate_up_proj",
            "feed_forward.experts.down_proj",
            suffixes=BARE,
            transposed=True,
        ),
        apart("feed_forward.experts", methods=("compressed-tensors",)),
    ),
    known_fields=frozenset(
        {
            "attention_bias",
            "attention_chunk_size",
            "layer_types",
            "no_rope_layers",
            "no_rope_layer_interval",
            "use_qk_norm",
            "attn_temperature_tuning",
            "attn_scale",
            "floor_scale",
            "intermediate_size_mlp",
            "moe_layers",
            "interleave_moe_layer_step",
            "num_local_experts",
            "num_experts_per_tok",
        }
    ),
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "interleave_moe_layer_step": 1,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
    },
)

FAMILIES.add("llama4_text", LLAMA4_TEXT)
