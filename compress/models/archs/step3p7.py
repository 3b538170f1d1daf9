"""Step 3.7 Flash (StepFun, 2026) with its vision tower. Layers with a window have other numbers of query
heads and other ropes than those with full attention. Every head has a gate, and layers after the third have
experts. In the last layers activations have caps. Layers that predict further tokens have matrices of logits
of their own (`mtp.py`), and each reads the stream of the one before, as in vLLM and SGLang.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.caps import caps_after, with_caps
from compress.models.config_facts import only_own_code
from compress.models.config_writer import PER_LAYER
from compress.models.family import FAMILIES, Family
from compress.models.layer_shape import HeadGate, LayerShape
from compress.models.layer_types import FULL, SLIDING, layer_types, windows_by_layer_type
from compress.models.limits import MAX_LAYERS, MAX_SIZE, SCALES, THETAS
from compress.models.mixture import (
    AS_IN_MEMORY,
    DENSE_LAYER,
    EXPERT,
    SPARSE_LAYER,
    ExpertLayout,
    Mixture,
    sparse_by_type,
    state_types,
)
from compress.models.module_names import LAYER_MODULES
from compress.models.mtp_names import AFTER_LAST
from compress.models.mtp_types import shape_by_types
from compress.models.per_layer import by_layer, keys_of_layers
from compress.models.rope_config import check_factors_of_types
from compress.models.wrapper import wrapper
from compress.untrusted.fields import Fields

# Published configs list ropes by layer, of which `transformers` takes those of the first layer of each type.
# They state layers with experts in a text (`moe_layers_enum`), and the heads of layers with a window in a
# mapping (`attention_other_setting`), which vLLM reads, too.
_FIRST_SPARSE = 3
"""The first layer with experts where a config states none."""
_HEADS = "num_attention_heads"
_WINDOW_HEADS = "num_sliding_attention_heads"
_OTHER = "attention_other_setting"
_KV_HEADS = "num_key_value_heads"
_SPARSE_LAYERS = "moe_layers_enum"
_ROPES = "rope_parameters"
_THETA = "rope_theta"
_SHARES = "partial_rotary_factors"
_SHARE = "partial_rotary_factor"
_QUERY_SCALE = "query_pre_attn_scalar"
_GATING = "gating"
_CAPS = {"experts": "swiglu_limits", "shared": "swiglu_limits_shared", "dense": "swiglu_limits_shared"}
_ALIASES = {
    _KV_HEADS: "num_attention_groups",
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "share_expert_dim": "share_expert_dims",
}
_FIELDS = {
    "num_experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "shared_size": "share_expert_dim",
    "scale": "moe_router_scaling_factor",
}


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of layers and of their FFNs, and the ropes of the types, of a config."""
    only_own_code(config, ("Step3p7Config", "Step3p7Model", "Step3p7ForConditionalGeneration"))
    _check_gating(config)
    check_factors_of_types(config)
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    types = config.texts("layer_types", default=[FULL] * num_layers)
    if set(types) - {FULL, SLIDING}:
        raise config.wrong("layer_types", types, f"each {FULL} or {SLIDING}")
    if SLIDING in types[:num_layers] and not config.has("sliding_window"):
        raise config.wrong("sliding_window", None, f"a window, which layers of {SLIDING} have")
    sparse = _sparse_layers(config, num_layers)
    ffns = [SPARSE_LAYER if idx in sparse else DENSE_LAYER for idx in range(num_layers)]
    return {
        "layer_types": types,
        "mlp_layer_types": config.texts("mlp_layer_types", default=ffns),
        _ROPES: _ropes(config, layer_types(config, num_layers)),
        "rope_scaling": None,
    }


def _check_gating(config: Fields) -> None:
    """Refuse a config that states another gate than one of each head, which is `true` or has a name."""
    if _GATING not in config:
        return
    stated = config.flag(_GATING) if config.is_flag(_GATING) else config.text(_GATING, default="null")
    if stated not in (True, "per-head"):
        raise config.wrong(_GATING, stated, "true or 'per-head'")


def _sparse_layers(config: Fields, num_layers: int) -> set[int]:
    """Return the layers that a config lists as those with experts, in a text or as numbers."""
    if not config.has(_SPARSE_LAYERS):
        return set(range(_FIRST_SPARSE, num_layers))
    if config.is_list(_SPARSE_LAYERS):
        return set(config.integers(_SPARSE_LAYERS, 0, MAX_LAYERS))
    listed = [each.strip() for each in config.text(_SPARSE_LAYERS).split(",") if each.strip()]
    if not all(each.isascii() and each.isdecimal() and len(each) <= 4 for each in listed):
        raise config.wrong(_SPARSE_LAYERS, config.text(_SPARSE_LAYERS), "layers with a comma between two")
    return set(map(int, listed))


def _ropes(config: Fields, types: list[str]) -> dict[str, Any]:
    """Return the rope of each type of layers: that which a config states for each, or else that of the first
    layer of the type, which is scaled in layers with full attention alone."""
    stated = config.fields(_ROPES, default={})
    kinds = list(dict.fromkeys(types))
    if all(stated.has(kind) for kind in kinds):
        return {kind: dict(stated.mapping(kind)) for kind in kinds}
    if list(stated):
        raise config.wrong(_ROPES, dict(config.mapping(_ROPES)), f"a mapping for each of {', '.join(kinds)}")
    scaling = config.mapping("rope_scaling", default={})
    return {
        kind: {
            _THETA: _of_layer(config, _THETA, THETAS, types.index(kind), 10000.0),
            _SHARE: _of_layer(config, _SHARES, (0, 1), types.index(kind), 1.0),
            **(scaling if kind == FULL else {}),
        }
        for kind in kinds
    }


def _of_layer(config: Fields, name: str, limits: tuple[float, float], idx: int, default: float) -> float:
    """Return the number of a layer, of a list with one for each, or that of all layers."""
    if not config.is_list(name):
        return config.number(name, *limits, default=default)
    numbers = config.numbers(name, *limits)
    if not numbers:
        return default
    if idx >= len(numbers):
        raise config.wrong(name, numbers, "a list with a number for each layer")
    return numbers[idx]


def _head_gate(config: Fields) -> HeadGate:
    return "sigmoid"


def _facts(config: Fields) -> dict[str, Any]:
    facts: dict[str, Any] = {"norm_offset": 1.0}
    head_dim = config.integer("head_dim", 1, MAX_SIZE)
    divisor = config.number(_QUERY_SCALE, 1e-3, SCALES[1], default=head_dim)
    return facts if divisor == head_dim else {**facts, "attn_scale": divisor**-0.5}


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Return the layers with the query heads of those with a window, and with the caps that are listed."""
    heads = _heads_in_windows(config)
    own = tuple(layer if layer.window is None else replace(layer, num_heads=heads) for layer in layers)
    if config.has(PER_LAYER):
        _check_heads_by_layer(config, own)
    return with_caps(config, own, **_CAPS)


def _heads_in_windows(config: Fields) -> int:
    """Return the query heads of layers with a window. Refuse other facts of theirs in the mapping of
    published configs, of which `transformers` reads the heads alone."""
    heads = config.integer(_HEADS, 1, MAX_SIZE)
    other = config.fields(_OTHER, default={})
    own = other.integer(_HEADS, 1, MAX_SIZE, default=heads)
    same = {"num_attention_groups": _KV_HEADS, "head_dim": "head_dim", "true_head_dim": "head_dim"}
    for name, of_all in same.items():
        expected = config.integer(of_all, 1, MAX_SIZE)
        if other.integer(name, 1, MAX_SIZE, default=expected) != expected:
            raise other.wrong(name, other.integer(name, 1, MAX_SIZE), f"{expected}, as in other layers")
    if other.text("attention_type", default=SLIDING) != SLIDING:
        raise other.wrong("attention_type", other.text("attention_type"), SLIDING)
    if config.integer(_WINDOW_HEADS, 1, MAX_SIZE, default=own) != own and list(other):
        raise config.wrong(_WINDOW_HEADS, config.integer(_WINDOW_HEADS, 1, MAX_SIZE), f"{own}, by {_OTHER}")
    return config.integer(_WINDOW_HEADS, 1, MAX_SIZE, default=own)


def _check_heads_by_layer(config: Fields, layers: tuple[LayerShape, ...]) -> None:
    """Refuse widths that single layers have for themselves (`PER_LAYER`), other than the heads of layers with
    a window, as `transformers` writes them."""
    stated = config.fields(PER_LAYER)
    keys = keys_of_layers(config)
    plain = config.integer(_HEADS, 1, MAX_SIZE)
    for idx, layer in enumerate(layers):
        key = keys.get(idx, str(idx))
        own = stated.fields(key, default={})
        if set(own) - {_HEADS} or own.integer(_HEADS, 1, MAX_SIZE, default=plain) != layer.num_heads:
            expected = {_HEADS: layer.num_heads}
            raise stated.wrong(key, dict(stated.mapping(key, default={})), f"{expected}")


def _by_layer(layers: tuple[LayerShape, ...]) -> dict[str, dict[str, int]]:
    """Return the heads of layers with a window, by keys of one length, as `transformers` writes them."""
    own = {idx: {_HEADS: each.num_heads} for idx, each in enumerate(layers) if each.window is not None}
    return by_layer(own)


def _restated(arch: Arch) -> dict[str, Any]:
    """Return the heads of both types of layers and the layers with experts, by the fields that a config has.

    Raises:
        UnsupportedArch: layers of one type have different numbers of query heads, which no config can state.
    """
    text = STEP3P7.stated(arch.config)
    heads = {
        kind: {layer.num_heads for layer in arch.layers if (layer.window is None) == (kind == FULL)}
        for kind in (FULL, SLIDING)
    }
    if any(len(each) > 1 for each in heads.values()):
        raise UnsupportedArch(
            "layers of one type have different numbers of query heads, which no config.json of "
            f"{arch.family} can say."
        )
    fields: dict[str, Any] = {}
    in_windows = next(iter(heads[SLIDING]), None)
    fields[_HEADS] = next(iter(heads[FULL]), text.get(_HEADS))
    if in_windows is not None and (_WINDOW_HEADS in text or _OTHER not in text):
        fields[_WINDOW_HEADS] = in_windows
    if in_windows is not None and isinstance(text.get(_OTHER), Mapping):
        fields[_OTHER] = {**text[_OTHER], _HEADS: in_windows}
    if PER_LAYER in text:
        fields[PER_LAYER] = _by_layer(arch.layers)
    if "num_attention_groups" in text:
        fields["num_attention_groups"] = arch.layers[0].num_kv_heads
    if text.get(_SPARSE_LAYERS) is not None:
        sparse = [idx for idx, layer in enumerate(arch.layers) if layer.experts is not None]
        fields[_SPARSE_LAYERS] = (
            ",".join(map(str, sparse)) if isinstance(text[_SPARSE_LAYERS], str) else sparse
        )
    return fields


def _shape_of_mtp(target: Arch) -> LayerShape:
    """Return the shape of the layers that predict further tokens, whose types a config states after those of
    the layers, or by themselves. Raises as `shape_by_types`."""
    config = Fields(STEP3P7.stated(target.config), "the text config of this model", UnsupportedArch)
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    types = config.texts("layer_types", default=[FULL] * (num_layers + 1))[num_layers:]
    is_sparse = num_layers in _sparse_layers(config, num_layers)
    layer = shape_by_types(target, config, types, [SPARSE_LAYER if is_sparse else DENSE_LAYER])
    cap = caps_after(config, _CAPS["dense"], num_layers)
    return replace(layer, ffn_cap=cap, expert_cap=None) if layer.experts is None else layer


_MTP = replace(
    AFTER_LAST,
    modules={
        **AFTER_LAST.modules,
        "norm": "{layer}.transformer.shared_head.norm",
        "head": "{layer}.transformer.shared_head.output",
    },
    shape=_shape_of_mtp,
    feeds="stream",
    in_vllm=("model.layers.{index}", "model.layers.{index}.mtp_block"),
)


_TEXT = Family(
    model_type="step3p5",
    architecture="Step3p5ForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    ffn_bias="mlp_bias",
    qk_norm=True,
    head_gate=_head_gate,
    windows=windows_by_layer_type,
    full_widths={"num_heads": _HEADS},
    facts=_facts,
    shapes=_shapes,
    implied=_implied,
    restated=_restated,
    aliases=_ALIASES,
    mtp=_MTP,
    mixture=Mixture(
        _FIELDS,
        facts={"score": "sigmoid", "selection_bias": True, "renormalize": True},
        is_sparse=sparse_by_type,
        state_sparse=state_types,
    ),
    layer_modules={
        **LAYER_MODULES,
        "attn.head_gate": "self_attn.g_proj",
        "moe.router": "moe.gate",
        "moe.selection_bias": "moe.router_bias",
        "moe.shared.gate": "share_expert.gate_proj",
        "moe.shared.up": "share_expert.up_proj",
        "moe.shared.down": "share_expert.down_proj",
    },
    expert_layouts=(
        ExpertLayout({f"{EXPERT}{name}": f"moe.{name}_proj" for name in ("gate", "up", "down")}),
        AS_IN_MEMORY,
    ),
    in_memory={
        f"model.{part}": f"model.language_model.{part}" for part in ("embed_tokens", "layers.", "norm")
    },
    in_memory_inside={
        "moe.router_bias": "mlp.gate.e_score_correction_bias",
        "moe.gate": "mlp.gate",
        "share_expert": "mlp.shared_experts",
    },
    known_fields=frozenset(
        {
            *_FIELDS.values(),
            *_CAPS.values(),
            _WINDOW_HEADS,
            _OTHER,
            _SPARSE_LAYERS,
            _SHARES,
            _SHARE,
            _QUERY_SCALE,
            _GATING,
            PER_LAYER,
            "attention_bias",
            "auto_map",
            "layer_types",
            "mlp_bias",
            "mlp_layer_types",
            "mtp_layer_types",
            "mtp_mlp_layer_types",
            "num_nextn_predict_layers",
            "sliding_window",
        }
    ),
    fixed_fields={
        "att_impl_type": "GQA",
        "hidden_act": "silu",
        "moe_every_n_layer": 1,
        "moe_layer_offset": 0,
        "moe_router_activation": "sigmoid",
        "norm_expert_weight": True,
        "sink": False,
        "use_bidirectional_attention": False,
        "use_head_wise_attn_gate": True,
        "use_moe": True,
        "use_moe_router_bias": True,
        "use_rope_layers": [],
        "yarn_only_types": [FULL],
        "zero_centered": True,
    },
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "vocab_size": 128815,
        "hidden_size": 4096,
        "num_hidden_layers": 45,
        _HEADS: 64,
        _KV_HEADS: 8,
        "head_dim": 128,
        "intermediate_size": 11264,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
        "moe_router_scaling_factor": 1.0,
    },
)
STEP3P7 = wrapper(
    "step3p7",
    "Step3p7ForConditionalGeneration",
    _TEXT,
    # `transformers` renames and splits tensors of the tower; those that it saved so stay as they are.
    untouched=("vision_model", "vit_large_projector", "model.vision_model", "model.multi_modal_projector"),
)

FAMILIES.add("step3p7", STEP3P7)
