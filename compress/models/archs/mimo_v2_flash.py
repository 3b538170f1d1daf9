"""MiMo-V2-Flash (Xiaomi, 2025, arXiv 2601.02780): layers with a window have twice the KV heads of the others,
a rope of their own and attention sinks. Values are narrower than keys and have a constant factor, a third of
each head rotates, and after a dense layer experts are chosen by the sigmoids of the router with a bias that
their weights do not have. Each of the layers that predict further tokens reads the hidden states of the
model (`mtp.py`), as SGLang computes them.

The factor of the values is one of the outputs of `attn.o`, which has no bias. Published configs state the
layers by fields that `transformers` does not read (`hybrid_layer_pattern`, `swa_rope_theta` and others): a
config in which they differ from what `transformers` computes is refused.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.config_facts import only_own_code
from compress.models.family import FAMILIES, Family
from compress.models.layer_shape import LayerShape
from compress.models.layer_types import FULL, SLIDING, windows_by_layer_type
from compress.models.limits import MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, SCALES, THETAS
from compress.models.mixture import (
    AS_IN_MEMORY,
    DENSE_LAYER,
    SPARSE_LAYER,
    Mixture,
    apart,
    sparse_by_type,
    state_types,
)
from compress.models.module_names import LAYER_MODULES
from compress.models.mtp_names import MtpNames, with_dense_ffn
from compress.untrusted.fields import Fields

_PERIOD = 6
_KV_HEADS = "num_key_value_heads"
_VALUES = "v_head_dim"
_SCALE = "routed_scaling_factor"
_SHARE = "partial_rotary_factor"
_ROPES = "rope_parameters"
_WINDOW = "sliding_window"
_PAST = "sliding_window_size"
_THETAS = {FULL: "rope_theta", SLIDING: "swa_rope_theta"}
"""Types of layers -> the field of published configs that states the base of their rope."""
_PLAIN: Mapping[str, Any] = {FULL: {"rope_theta": 5000000.0}, SLIDING: {"rope_theta": 10000.0}}
_PLAIN_SHARE = 0.334
"""The share of a head that rotates in a plain rope that states none."""
_PATTERNS = {
    "hybrid_layer_pattern": ("layer_types", SLIDING),
    "moe_layer_freq": ("mlp_layer_types", SPARSE_LAYER),
}
"""Fields of published configs that have a 1 for each layer of a type, else a 0 -> the field that
`transformers` reads, and that type."""
_TWINS = {
    "swa_num_attention_heads": ("num_attention_heads", 1),
    "swa_num_key_value_heads": (_KV_HEADS, 2),
    "swa_head_dim": ("head_dim", 1),
    "swa_v_head_dim": (_VALUES, 1),
}
"""Fields of published configs for layers with a window -> the field of the others, and how many times its
value `transformers` takes."""
_FIELDS = {
    "num_experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "renormalize": "norm_topk_prob",
    "scale": _SCALE,
    "num_groups": "n_group",
    "top_groups": "topk_group",
}


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of layers, the window and the ropes of a config. Refuse published fields that state
    others."""
    only_own_code(config, ("MiMoV2FlashConfig", "MiMoV2FlashModel", "MiMoV2FlashForCausalLM"))
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    is_full = [idx == 0 or (idx + 1) % _PERIOD == 0 for idx in range(num_layers)]
    by_default = {
        "layer_types": [FULL if full else SLIDING for full in is_full],
        "mlp_layer_types": [DENSE_LAYER] + [SPARSE_LAYER] * (num_layers - 1),
    }
    types = {name: config.texts(name, default=default) for name, default in by_default.items()}
    if set(types["layer_types"]) - {FULL, SLIDING}:
        raise config.wrong("layer_types", types["layer_types"], f"each {FULL} or {SLIDING}")
    for pattern, (name, kind) in _PATTERNS.items():
        expected = [int(each == kind) for each in types[name]]
        if config.has(pattern) and config.integers(pattern, 0, 1) != expected:
            raise config.wrong(pattern, config.integers(pattern, 0, 1), f"{expected}, by {name}")
    for twin, (name, times) in _TWINS.items():
        expected_size = times * config.integer(name, 1, MAX_SIZE)
        if (size := config.integer(twin, 1, MAX_SIZE, default=expected_size)) != expected_size:
            raise config.wrong(twin, size, f"{expected_size}, by {name}")
    window = config.integer(_WINDOW, 1, MAX_POSITIONS)
    if config.has(_PAST):  # does not count the query itself
        window = config.integer(_PAST, 1, MAX_POSITIONS - 1) + 1
    return {
        **types,
        _ROPES: _ropes(config, types["layer_types"]),
        _WINDOW: window,
        _SCALE: config.number(_SCALE, *SCALES, default=1.0),
    }


def _ropes(config: Fields, types: list[str]) -> dict[str, Any]:
    """Return the rope of each type of layers, with the share of a head that rotates. Refuse fields outside of
    the ropes that state another base or share."""
    if config.mapping("rope_scaling", default={}):
        raise config.wrong("rope_scaling", config.mapping("rope_scaling"), f"{_ROPES}, one for each type")
    stated = config.fields(_ROPES, default=_PLAIN)
    ropes: dict[str, Any] = {}
    for kind in (each for each in _THETAS if each in types):
        rope = stated.fields(kind)
        is_plain = rope.text("rope_type", default="default") == "default"
        ropes[kind] = {_SHARE: _PLAIN_SHARE if is_plain else 1.0, **stated.mapping(kind)}
        for name, own in ((_THETAS[kind], "rope_theta"), (_SHARE, _SHARE)):
            if config.has(name) and config.number(name, 0, THETAS[1]) != ropes[kind].get(own):
                raise config.wrong(name, config.number(name, 0, THETAS[1]), f"that of {kind} in {_ROPES}")
    return ropes


def _facts(config: Fields) -> dict[str, Any]:
    """Return the facts of attention; refuse another eps that programs read by its published name."""
    eps = config.number("rms_norm_eps", 0, 1)
    if config.number("layernorm_epsilon", 0, 1, default=eps) != eps:
        raise config.wrong("layernorm_epsilon", config.number("layernorm_epsilon", 0, 1), f"{eps:g}")
    factor = config.number("attention_value_scale", *SCALES, default=1.0)
    factors = {} if factor == 1 else {"linear_factors": (("attn.o", factor),)}
    return {"attn_sinks": True, "windowed_sinks": True, **factors}


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Return the layers with the widths of their values, and twice the KV heads where there is a window."""
    values = config.integer(_VALUES, 1, MAX_SIZE)
    return tuple(
        replace(
            layer,
            num_kv_heads=layer.num_kv_heads * (1 if layer.window is None else 2),
            narrow_value_dim=None if values == layer.head_dim else values,
        )
        for layer in layers
    )


def _restated(arch: Arch) -> dict[str, Any]:
    """Return the KV heads of layers without a window, and in published fields those of the others.

    Raises:
        UnsupportedArch: layers with a window do not have twice as many, which no config can state.
    """
    heads = {layer.num_kv_heads * (2 if layer.window is None else 1) for layer in arch.layers}
    of_windows = min(heads)
    if len(heads) > 1 or of_windows % 2:
        raise UnsupportedArch(
            "layers with a window do not have twice the KV heads of those without, as configs of "
            f"{arch.family} state it."
        )
    stated = {_KV_HEADS: of_windows // 2}
    twins = {"swa_num_key_value_heads": of_windows, "swa_num_attention_heads": arch.layers[0].num_heads}
    return stated | {name: value for name, value in twins.items() if name in arch.config}


def _shape_of_mtp(target: Arch) -> LayerShape:
    """Return the shape of the layers that predict further tokens: attention in a window, and a dense FFN."""
    windowed = [layer for layer in target.layers if layer.window is not None]
    return with_dense_ffn(target, (windowed or target.layers)[-1])


_MTP = MtpNames(
    {
        "embed_norm": "{layer}.enorm",
        "hidden_norm": "{layer}.hnorm",
        "fc": "{layer}.eh_proj",
        "norm": "{layer}.final_layernorm",
    },
    "model.mtp.layers.",
    layer_modules={"ffn_norm": "pre_mlp_layernorm"},
    shape=_shape_of_mtp,
    feeds="target",
)


FAMILIES.add(
    "mimo_v2_flash",
    Family(
        model_type="mimo_v2_flash",
        architecture="MiMoV2FlashForCausalLM",
        qkv_bias="attention_bias",
        windows=windows_by_layer_type,
        full_widths={"num_kv_heads": _KV_HEADS},
        facts=_facts,
        shapes=_shapes,
        implied=_implied,
        restated=_restated,
        mixture=Mixture(
            _FIELDS,
            facts={"score": "sigmoid", "selection_bias": True},
            is_sparse=sparse_by_type,
            state_sparse=state_types,
        ),
        mtp=_MTP,
        layer_modules={
            **LAYER_MODULES,
            "attn.sinks": "self_attn.attention_sink_bias",
            "moe.router": "mlp.gate",
            "moe.selection_bias": "mlp.gate.e_score_correction_bias",
        },
        expert_layouts=(
            apart("mlp.experts"),
            replace(AS_IN_MEMORY, modules={**AS_IN_MEMORY.modules, "attn.sinks": "self_attn.sinks"}),
        ),
        ignored_tensors=r"rotary_emb\.inv_freq$|^model\.mtp\.",
        aliases={"n_routed_experts": "num_local_experts"},
        known_fields=frozenset(
            {
                *_FIELDS.values(),
                *_PATTERNS,
                *_TWINS,
                _VALUES,
                _WINDOW,
                _PAST,
                _SHARE,
                "swa_rope_theta",
                "attention_bias",
                "attention_value_scale",
                "layer_types",
                "mlp_layer_types",
                "layernorm_epsilon",
                "attention_chunk_size",  # for layers of a type that the family does not have
                "auto_map",
            }
        ),
        fixed_fields={
            "add_full_attention_sink_bias": False,
            "add_swa_attention_sink_bias": True,
            "n_shared_experts": 0,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        defaults={
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 4,
            "head_dim": 192,
            _VALUES: 128,
            "intermediate_size": 16384,
            "max_position_embeddings": 131072,
            _WINDOW: 129,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "attention_value_scale": 0.707,
        },
    ),
)
