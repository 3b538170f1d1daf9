"""The text model of dots3-note (Dots Studio, 2026): latent attention in which normed latents are rescaled and
what all keys share is normed before it rotates, with gates of heads. Most layers have a window, and heads and
latents of other widths than the others, whose keys an indexer chooses. The first layer is dense, and experts
are chosen as in DeepSeek-V3. The layer that predicts a further token is not read."""

from dataclasses import replace
from typing import Any

from compress.models.arch import Arch
from compress.models.archs.deepseek_v32 import DEEPSEEK_V32, INDEX_PAIRS, with_indexers
from compress.models.archs.glm4_moe import SIGMOID_MIXTURE
from compress.models.config_writer import PER_LAYER
from compress.models.family import FAMILIES
from compress.models.latent import MAX_RANK, Latent
from compress.models.layer_shape import HeadGate, LayerShape
from compress.models.layer_types import FULL, SLIDING, windows_by_layer_type
from compress.models.limits import MAX_LAYERS, MAX_POSITIONS, MAX_SIZE
from compress.models.mixture import (
    DENSE_LAYER,
    FIRST_DENSE,
    SPARSE_LAYER,
    check_dense_layers,
    sparse_by_type,
    state_types,
)
from compress.models.per_layer import by_layer, keys_of_layers
from compress.untrusted.fields import Fields

_INDEXED = "indexed_attention"
_ROPES = "rope_parameters"
_FREQ = "moe_layer_freq"
_USE_INDEXERS = "use_dsa"
_USE_WINDOWS = "use_sliding_window"
_WINDOW_THETA = "swa_rope_theta"
_SHARED = "shared_experts_intermediate_size"
_HEADS = ("num_attention_heads", "num_key_value_heads")
_WINDOW_WIDTHS = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}
"""Widths of layers with a window, and what they are where a config does not state them."""
_WINDOW_HEAD_DIM = 256


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of layers and of their FFNs in the standard spelling, the window, and a rope for each
    type."""
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    kinds = _kinds(config, num_layers)
    return {
        "layer_types": [SLIDING if kind == SLIDING else FULL for kind in kinds],
        "mlp_layer_types": _ffn_types(config, num_layers),
        "sliding_window": _window(config),
        _USE_INDEXERS: _INDEXED in kinds,
        _USE_WINDOWS: True,
        _ROPES: _ropes(config, kinds),
        "rope_scaling": None,
    }


def _kinds(config: Fields, num_layers: int) -> list[str]:
    """Return the type of each layer by the names of `transformers`: without a window `indexed_attention` or
    `full_attention`. Published configs state the second where `use_dsa` decides, which is on by default.

    Raises:
        UnsupportedArch: a type is unknown, or there are layers of both.
    """
    by_default = None if config.has(PER_LAYER) else True
    indexed = config.flag(_USE_INDEXERS) if config.has(_USE_INDEXERS) else by_default
    if config.has(PER_LAYER) and not config.has("layer_types"):
        raise config.wrong("layer_types", None, f"stated where {PER_LAYER} is")
    if config.has("layer_types"):
        kinds = config.texts("layer_types")
    else:
        has_windows = config.flag(_USE_WINDOWS, default=True)
        whole = FULL if indexed is False else _INDEXED
        kinds = [SLIDING if has_windows and idx >= 2 and idx % 4 != 1 else whole for idx in range(num_layers)]
    if len(kinds) < num_layers or set(kinds) - {SLIDING, FULL, _INDEXED}:
        known = f"{num_layers} times {SLIDING}, {FULL} or {_INDEXED}"
        raise config.wrong("layer_types", kinds, known)
    kinds = kinds[:num_layers]
    if indexed is not None:
        kinds = [kind if kind == SLIDING else _INDEXED if indexed else FULL for kind in kinds]
    if {FULL, _INDEXED} <= set(kinds):
        raise config.wrong("layer_types", kinds, f"those without a window all {FULL} or all {_INDEXED}")
    return kinds


def _ffn_types(config: Fields, num_layers: int) -> list[str]:
    """Return the type of the FFN of each layer: as stated, or sparse after the first ones, in every n-th
    layer or in those of a list. Refuse a config that states two numbers of dense layers."""
    if config.has("mlp_layer_types"):
        check_dense_layers(config)
        return config.texts("mlp_layer_types")
    first = config.integer(FIRST_DENSE, 0, MAX_LAYERS, default=1)
    if config.is_list(_FREQ):
        stated = config.integers(_FREQ, 0, 1)
        if len(stated) < num_layers:
            raise config.wrong(_FREQ, list(stated), f"a number or {num_layers} of them")
        sparse = [bool(each) for each in stated]
    else:
        every = config.integer(_FREQ, 1, MAX_LAYERS, default=1)
        sparse = [idx % every == 0 for idx in range(num_layers)]
    return [SPARSE_LAYER if idx >= first and sparse[idx] else DENSE_LAYER for idx in range(num_layers)]


def _window(config: Fields) -> int:
    """Return the positions that a query sees in layers with a window."""
    name = next((each for each in ("sliding_window", "sliding_window_size") if config.has(each)), None)
    return 512 if name is None else config.integer(name, 1, MAX_POSITIONS)


def _ropes(config: Fields, kinds: list[str]) -> dict[str, Any]:
    """Return the rope of both types of layers. Those of `transformers` state a share of a head that is the
    width of what rotates.

    Raises:
        UnsupportedArch: one rope is stated for both, which programs read in two ways.
    """
    stated = config.fields(_ROPES, default=config.mapping("rope_scaling", default={}))
    whole = _INDEXED if _INDEXED in kinds else FULL
    if list(stated) and (set(stated) - {SLIDING, FULL, _INDEXED} or set(kinds) - set(stated)):
        wanted = f"a mapping for each of {', '.join(dict.fromkeys(kinds))}"
        raise config.wrong(_ROPES, sorted(stated), wanted)
    theta = config.number("rope_theta", 1, 1e12)
    ropes = {}
    for ours, theirs in ((FULL, whole), (SLIDING, SLIDING)):
        own = theta if ours == FULL else config.number(_WINDOW_THETA, 1, 1e12)
        rope = {"rope_theta": theta if list(stated) else own, **stated.mapping(theirs, default={})}
        ropes[ours] = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
    return ropes


def _facts(config: Fields) -> dict[str, Any]:
    """Return the eps of the norms of latents. Refuse a config without a latent of queries."""
    if not config.has("q_lora_rank"):
        raise config.wrong("q_lora_rank", None, "the width of the latents of queries, which this family has")
    return {"latent_eps": config.number("rms_norm_eps", 0, 1)}


def _latent(config: Fields) -> Latent:
    """Return the latents of layers without a window."""
    return Latent(
        q_rank=config.integer("q_lora_rank", 1, MAX_RANK),
        kv_rank=config.integer("kv_lora_rank", 1, MAX_RANK),
        rope_dim=config.integer("qk_rope_head_dim", 2, MAX_SIZE),
        value_dim=config.integer("v_head_dim", 1, MAX_SIZE),
        interleaved=True,
        rescaled=True,
        rope_norm=True,
    )


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Return the layers with indexers, and with widths of their own where they have a window."""
    kinds = _kinds(config, len(layers))
    if config.has(PER_LAYER):
        _check_others(config, kinds)
    layers = with_indexers(config, layers, [kind == _INDEXED for kind in kinds], interleaved=True)
    own = [_widths_in_windows(config, idx) if kind == SLIDING else None for idx, kind in enumerate(kinds)]
    if any(each != next(filter(None, own)) for each in own if each is not None):
        raise config.wrong(PER_LAYER, "widths of several kinds", "the same in all layers with a window")
    return tuple(
        layer if widths is None else _in_window(layer, widths)
        for layer, widths in zip(layers, own, strict=True)
    )


def _in_window(layer: LayerShape, widths: dict[str, int]) -> LayerShape:
    """Return a layer with the widths of those with a window."""
    rope_dim = widths["qk_rope_head_dim"]
    return replace(
        layer,
        num_heads=widths["num_attention_heads"],
        num_kv_heads=widths["num_key_value_heads"],
        head_dim=widths["qk_nope_head_dim"] + rope_dim,
        rope=layer.rope and replace(layer.rope, rotary_dim=rope_dim),
        latent=layer.latent
        and replace(
            layer.latent,
            q_rank=widths["q_lora_rank"],
            kv_rank=widths["kv_lora_rank"],
            rope_dim=rope_dim,
            value_dim=widths["v_head_dim"],
        ),
    )


def _widths_in_windows(config: Fields, idx: int) -> dict[str, int]:
    """Return the widths of a layer with a window: those that the mapping of `transformers` has for it, or
    else those of the model; without that mapping those of fields of their own.

    Raises:
        UnsupportedArch: the size of a head is not the sum of its parts.
    """
    names = [*_WINDOW_WIDTHS, "qk_rope_head_dim", "head_dim"]
    if config.has(PER_LAYER):
        own = config.fields(PER_LAYER).fields(keys_of_layers(config).get(idx, str(idx)), default={})
        widths = {name: (own if own.has(name) else config).integer(name, 1, MAX_SIZE) for name in names}
    else:
        widths = {
            name: config.integer(f"swa_{name}", 1, MAX_SIZE, default=default)
            for name, default in _WINDOW_WIDTHS.items()
        }
        widths["head_dim"] = config.integer("swa_head_dim", 1, MAX_SIZE, default=_WINDOW_HEAD_DIM)
        rest = widths["head_dim"] - widths["qk_nope_head_dim"]
        if rest < 1:
            wanted = f"more than swa_qk_nope_head_dim, {widths['qk_nope_head_dim']}"
            raise config.wrong("swa_head_dim", widths["head_dim"], wanted)
        widths["qk_rope_head_dim"] = config.integer("swa_qk_rope_head_dim", 1, MAX_SIZE, default=rest)
    parts = widths["qk_nope_head_dim"] + widths["qk_rope_head_dim"]
    if widths["head_dim"] != parts:
        field = f"head_dim of {PER_LAYER}" if config.has(PER_LAYER) else "swa_head_dim"
        raise config.wrong(field, widths["head_dim"], f"{parts}, the sum of its parts")
    return widths


def _check_others(config: Fields, kinds: list[str]) -> None:
    """Refuse widths of their own of layers without a window, and other fields than widths."""
    stated = config.fields(PER_LAYER)
    known = {*_WINDOW_WIDTHS, "qk_rope_head_dim", "head_dim"}
    for idx, key in keys_of_layers(config).items():
        if idx >= len(kinds):
            continue
        names = set(stated.fields(key))
        if names - known or (names and kinds[idx] != SLIDING):
            raise stated.wrong(key, sorted(names), f"widths of a layer of {SLIDING}")


def _experts(config: Fields) -> dict[str, Any]:
    """Return the width of the shared experts, which are one FFN."""
    num_shared = config.integer("n_shared_experts", 1, 64)
    return {"shared_size": num_shared * config.integer(_SHARED, 1, MAX_SIZE)}


def _head_gate(config: Fields) -> HeadGate:
    return "sigmoid"


def _restated(arch: Arch) -> dict[str, Any]:
    """Return the heads of layers without a window, where there are none those of the source, and the widths
    of those with a window, by the fields that a config has."""
    text = arch.config.get("text_config") or arch.config
    whole = [layer for layer in arch.layers if layer.window is None]
    in_windows = {idx: layer for idx, layer in enumerate(arch.layers) if layer.window is not None}
    stated = {**_DEFAULTS, **text}
    if whole:
        stated |= {"num_attention_heads": whole[0].num_heads, "num_key_value_heads": whole[0].num_kv_heads}
    fields = {name: stated[name] for name in _HEADS}
    if PER_LAYER in text:
        widths = {
            idx: {name: size for name, size in _widths_of(layer).items() if stated[name] != size}
            for idx, layer in in_windows.items()
        }
        return {**fields, PER_LAYER: by_layer(widths)}
    for layer in list(in_windows.values())[:1]:
        for name in _HEADS:
            if text.get(f"swa_{name}", _WINDOW_WIDTHS[name]) != layer.num_heads:
                fields[f"swa_{name}"] = layer.num_heads
    return fields


def _widths_of(layer: LayerShape) -> dict[str, int]:
    """Return the widths of a layer by the fields of a config."""
    latent = layer.latent
    assert latent is not None
    return {
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "head_dim": layer.head_dim,
        "qk_nope_head_dim": layer.head_dim - latent.rope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
    }


_DEFAULTS: dict[str, Any] = {
    **{name: value for name, value in DEEPSEEK_V32.defaults.items() if name != FIRST_DENSE},
    "rms_norm_eps": 1e-5,
    "rope_theta": 80000000.0,
    _WINDOW_THETA: 50000.0,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 13824,
    "moe_intermediate_size": 1536,
    _SHARED: 1536,
    "max_position_embeddings": 524288,
    "q_lora_rank": 1024,
    "head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
_FIXED = {
    "topk_method": "noaux_tc",
    "mlp_bias": False,
    "rope_interleave": True,
    INDEX_PAIRS: True,
    "qk_layernorm": True,
    "apply_mla_qkv_lora_rescale": True,
    "k_rope_only_layernorm": True,
    "attention_gate_type": "headwise",
    "swa_attention_gate_type": "headwise",
}

DOTS3_NOTE_TEXT = replace(
    DEEPSEEK_V32,
    model_type="dots3_note_text",
    architecture="Dots3NoteForCausalLM",
    latent=_latent,
    facts=_facts,
    implied=_implied,
    shapes=_shapes,
    restated=_restated,
    windows=windows_by_layer_type,
    full_widths={"num_heads": _HEADS[0], "num_kv_heads": _HEADS[1]},
    head_gate=_head_gate,
    mtp=None,
    mixture=replace(SIGMOID_MIXTURE, is_sparse=sparse_by_type, state_sparse=state_types, read_more=_experts),
    layer_modules={
        **DEEPSEEK_V32.layer_modules,
        "attn.head_gate": "self_attn.g_proj",
        "attn.rope_norm": "self_attn.k_rope_only_layernorm",
    },
    ignored_tensors=rf"{DEEPSEEK_V32.ignored_tensors}|^model\.(language_model\.)?mtp\.",
    aliases={_SHARED: "moe_shared_expert_intermediate_size", "n_routed_experts": "num_local_experts"},
    known_fields=(DEEPSEEK_V32.known_fields - {"auto_map"})
    | {
        PER_LAYER,
        _FREQ,
        _SHARED,
        _USE_INDEXERS,
        _USE_WINDOWS,
        _WINDOW_THETA,
        "sliding_window",
        "sliding_window_size",
        "swa_head_dim",
        "swa_qk_rope_head_dim",
        *(f"swa_{name}" for name in _WINDOW_WIDTHS),
    },
    fixed_fields=_FIXED,
    defaults=_DEFAULTS,
)
FAMILIES.add("dots3_note_text", DOTS3_NOTE_TEXT)
