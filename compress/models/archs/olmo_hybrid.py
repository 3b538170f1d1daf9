"""OLMo Hybrid 7B (Ai2, 2026): three of four layers have gated delta nets (arXiv 2412.06464) after norms of
their inputs, the others attention of OLMo 3, whose outputs are normed. Beta is doubled, and published models
encode no positions. On disk the convolution of queries, keys and values is three tensors. `save_pretrained`
of `transformers` 5.23 cuts it into thirds and names norms otherwise: such checkpoints are read, too, and
written as published."""

from dataclasses import replace
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.delta_net import DeltaNet
from compress.models.delta_net_config import DELTA_FIELDS, delta_net_of, stated_widths
from compress.models.family import FAMILIES, Family
from compress.models.layer_types import FULL, LINEAR, every_nth_full, layer_types
from compress.models.limits import MAX_LAYERS, MAX_SIZE, THETAS
from compress.models.module_names import LAYER_MODULES, POST_NORM_MODULES
from compress.untrusted.fields import Fields

_PERIOD = 4
_THETA = 10000.0
_ROPE = "rope_parameters"
_BASE = "rope_theta"
_DOUBLES = "linear_allow_neg_eigval"
_INITIAL = frozenset(
    {"linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"}
)
"""Fields by which the class draws the first parameters of a model, and nothing else."""


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of layers, the widths of delta nets, and the rope in one mapping."""
    types = every_nth_full(config, _PERIOD, LINEAR)
    if types and FULL not in types["layer_types"]:
        types["layer_types"][-1] = FULL
    heads = config.integer("num_attention_heads", 1, MAX_SIZE)
    key_heads = config.integer("linear_num_key_heads", 1, MAX_SIZE, default=heads)
    hidden_size = config.integer("hidden_size", 1, MAX_SIZE)
    by_default = max(int(0.75 * hidden_size / key_heads), 1)
    key_dim = config.integer("linear_key_head_dim", 1, MAX_SIZE, default=by_default)
    value_dim = config.integer("linear_value_head_dim", 1, MAX_SIZE, default=2 * key_dim)
    return {
        **types,
        **_rope(config),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": config.integer("linear_num_value_heads", 1, MAX_SIZE, default=heads),
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
    }


def _rope(config: Fields) -> dict[str, Any]:
    """Return the rope with its base. One of `null` is no rope; `rope_theta` is then that of none."""
    stated = config.mapping(_ROPE, default=config.mapping("rope_scaling", default={}))
    if any(isinstance(each, dict) for each in stated.values()):
        raise config.wrong(_ROPE, sorted(stated), "one rope for all layers in this family")
    rope = dict(stated)
    if _BASE not in rope:
        is_null = _BASE in config and not config.has(_BASE)
        rope[_BASE] = None if is_null else config.number(_BASE, *THETAS, default=_THETA)
    return {_ROPE: rope, _BASE: _THETA}


def _rotated_layers(config: Fields, num_layers: int) -> list[bool]:
    return [config.fields(_ROPE).has(_BASE)] * num_layers


def _delta_net(config: Fields) -> DeltaNet:
    types = layer_types(config, config.integer("num_hidden_layers", 1, MAX_LAYERS))
    if FULL not in types:
        raise config.wrong("layer_types", types, f"a list with {LINEAR} and {FULL} in this family")
    return replace(delta_net_of(config), doubled_beta=config.flag(_DOUBLES))


def _facts(config: Fields) -> dict[str, Any]:
    return {
        "block": "post",
        "recurrent_block": "pre",
        "recurrent_norm_eps": 1e-5,
        "whole_qk_norm": True,
    }


def _restated(arch: Arch) -> dict[str, Any]:
    """Return the types of the layers, and the widths of delta nets, which follow from those of attention
    where a config leaves them out."""
    delta_nets = [layer.recurrence for layer in arch.layers if isinstance(layer.recurrence, DeltaNet)]
    if not 0 < len(delta_nets) < arch.num_layers:
        raise UnsupportedArch(
            "all layers left are of one type; the class of this family takes models with layers of "
            f"{LINEAR} and of {FULL} only."
        )
    types = [FULL if layer.recurrence is None else LINEAR for layer in arch.layers]
    return {"layer_types": types, **stated_widths(delta_nets[0])}


OLMO_HYBRID = Family(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    facts=_facts,
    implied=_implied,
    restated=_restated,
    rotated_layers=_rotated_layers,
    recurrence=_delta_net,
    layer_modules={
        **LAYER_MODULES,
        **POST_NORM_MODULES,
        "delta.q": "linear_attn.q_proj",
        "delta.k": "linear_attn.k_proj",
        "delta.v": "linear_attn.v_proj",
        "delta.gate": "linear_attn.g_proj",
        "delta.beta": "linear_attn.b_proj",
        "delta.decay": "linear_attn.a_proj",
        "delta.conv": "linear_attn.conv1d",
        "delta.dt_bias": "linear_attn.dt_bias",
        "delta.A_log": "linear_attn.A_log",
        "delta.norm": "linear_attn.o_norm",
        "delta.o": "linear_attn.o_proj",
    },
    in_parts={"linear_attn.conv1d": tuple(f"linear_attn.{name}_conv1d" for name in "qkv")},
    in_memory_inside={
        "input_layernorm": "attention_layer_norm",
        "post_attention_layernorm": "feedforward_layer_norm",
    },
    known_fields=(DELTA_FIELDS - {"full_attention_interval"}) | _INITIAL | {"attention_bias", _DOUBLES},
    fixed_fields={"hidden_act": "silu"},
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 65536,
        "linear_conv_kernel_dim": 4,
        _DOUBLES: True,
    },
)
FAMILIES.add("olmo_hybrid", OLMO_HYBRID)
