"""Inkling (Thinking Machines, 2026), the text model alone, with the names that `transformers` has in memory.

Attention has no rope: relative logits give each score a term of the query and of the distance of the key, in
layers with a window of 512 positions for all of them, and in every sixth layer, which sees all positions, for
1,024. There scores also grow with the logarithm of the position beyond a floor. Convolutions over four
positions are added to the keys, to the values and to the outputs of both halves of a layer. The embedding is
normed. After dense FFNs, whose outputs have a factor, experts are chosen by the sigmoids of the router with a
bias that their weights do not have; the shared experts are scored with them, and all weights are divided by
their sum.

Published configs state the width of routed experts as `intermediate_size`, next to `dense_intermediate_size`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.experts import MAX_EXPERT_SIZE, MAX_EXPERTS, MAX_SCALE
from compress.models.family import FAMILIES, Family
from compress.models.layer_shape import LayerShape
from compress.models.layer_types import FULL, SLIDING, no_layer, windows_by_layer_type
from compress.models.limits import MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, SCALES
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
from compress.models.recurrence import MAX_KERNEL
from compress.models.relative_logits import RelativeLogits
from compress.untrusted.fields import Fields

_KINDS = {"hybrid": FULL, "hybrid_sliding": SLIDING}
_LOCAL = "local_layer_ids"
_PERIOD = 6
_WINDOW = "sliding_window_size"
_DENSE_FIRST = "dense_mlp_idx"
_DENSE_SIZE = "dense_intermediate_size"
_TYPES = "mlp_layer_types"
_EXPERTS = "n_routed_experts"
_CHOSEN = "num_experts_per_tok"
_SHARED = "n_shared_experts"
_EXPERT_SIZE = "moe_intermediate_size"
_WIDTHS = {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
_WINDOW_WIDTHS = {ours: f"swa_{name}" for ours, name in _WIDTHS.items()}
_MULTIPLIER = "logits_mup_width_multiplier"
_CONV_SIZE = "conv_kernel_size"
_HEAD = "unpadded_vocab_size"
_ALIASES = {
    _WINDOW: "sliding_window",
    _EXPERTS: "num_local_experts",
    _CONV_SIZE: "sconv_kernel_size",
    "max_position_embeddings": "model_max_length",
    _MULTIPLIER: "embedding_multiplier",
}


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of layers and FFNs, the window, and the widths of FFNs and experts."""
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    if config.has("layer_types"):
        types = config.texts("layer_types")
        if set(types) - _KINDS.keys():
            raise config.wrong("layer_types", types, f"each {' or '.join(_KINDS)}")
        kinds = [_KINDS[each] for each in types]
    else:
        by_rule = [idx for idx in range(num_layers) if (idx + 1) % _PERIOD]
        local = set(config.integers(_LOCAL, 0, MAX_LAYERS)) if config.has(_LOCAL) else set(by_rule)
        kinds = [SLIDING if idx in local else FULL for idx in range(num_layers)]
    implied = {
        "layer_types": kinds,
        _LOCAL: [idx for idx, kind in enumerate(kinds) if kind == SLIDING],
        _TYPES: [SPARSE_LAYER if each else DENSE_LAYER for each in _is_sparse(config, num_layers)],
        "sliding_window": config.integer(_WINDOW, 1, MAX_POSITIONS),
    }
    if config.has(_DENSE_SIZE):
        implied[_EXPERT_SIZE] = config.integer("intermediate_size", 1, MAX_EXPERT_SIZE)
        implied["intermediate_size"] = config.integer(_DENSE_SIZE, 1, MAX_SIZE)
    return implied


def _is_sparse(config: Fields, num_layers: int) -> list[bool]:
    """Return which layers have experts: as the types of FFNs state it, else all after some dense ones."""
    if config.has(_TYPES):
        return sparse_by_type(config, num_layers)
    first = config.integer(_DENSE_FIRST, -MAX_LAYERS, MAX_LAYERS, default=0)
    return [idx >= first for idx in range(num_layers)]


def _facts(config: Fields) -> dict[str, Any]:
    """Return the facts of the model."""
    multiplier = config.number(_MULTIPLIER, *SCALES)
    if multiplier == 0:
        raise config.wrong(_MULTIPLIER, multiplier, "a number other than 0")
    vocab_size = config.integer("vocab_size", 1, MAX_SIZE)
    head_vocab = config.integer(_HEAD, 1, MAX_SIZE, default=vocab_size)
    return {
        "inverse_scale": True,
        "logit_scale": 1 / multiplier,
        "embed_norm": True,
        "embed_norm_weight": True,
        "head_vocab": head_vocab if head_vocab < vocab_size else 0,
    }


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Return the layers with their relative logits and convolutions, and those with a window with widths of
    their own."""
    rank = config.integer("d_rel", 1, MAX_SIZE)
    growth = None
    if config.has("log_scaling_n_floor"):
        factor = config.number("log_scaling_alpha", *SCALES)
        growth = (factor, config.integer("log_scaling_n_floor", 1, MAX_POSITIONS))
    of_all = RelativeLogits(rank, config.integer("rel_extent", 1, MAX_POSITIONS), growth)
    in_windows: dict[str, Any] = {
        ours: config.integer(name, 1, MAX_SIZE) for ours, name in _WINDOW_WIDTHS.items()
    }
    return tuple(
        replace(
            layer,
            relative=of_all if layer.window is None else RelativeLogits(rank, layer.window),
            residual_convs=config.integer(_CONV_SIZE, 1, MAX_KERNEL),
            scaled_ffn=layer.experts is None,
            **({} if layer.window is None else in_windows),
        )
        for layer in layers
    )


def _read_experts(config: Fields) -> dict[str, Any]:
    """Return the experts of a layer: those that a token chooses, and after them those that all choose."""
    shared = config.integer(_SHARED, 1, MAX_EXPERTS)
    return {
        "num_experts": config.integer(_EXPERTS, 1, MAX_EXPERTS) + shared,
        "top_k": config.integer(_CHOSEN, 1, MAX_EXPERTS) + shared,
        "expert_size": config.integer(_EXPERT_SIZE, 1, MAX_EXPERT_SIZE),
        "always": shared,
        "scale": config.number("route_scale", -MAX_SCALE, MAX_SCALE),
    }


def _restated(arch: Arch) -> dict[str, Any]:
    """Return the fields of layers with a window, of experts and of dense layers.

    Raises:
        UnsupportedArch: layers of one type have heads of several widths, which no config can state.
    """
    text: Mapping[str, Any] = arch.config.get("text_config") or arch.config
    fields: dict[str, Any] = {}
    windowed = [layer for layer in arch.layers if layer.window is not None]
    for ours, name in _WINDOW_WIDTHS.items():
        if len({getattr(layer, ours) for layer in windowed}) > 1:
            raise UnsupportedArch(f"layers with a window have several {name}, which no config.json can say.")
        if windowed:
            fields[name] = getattr(windowed[0], ours)
    experts = next((layer.experts for layer in arch.layers if layer.experts is not None), None)
    if experts is not None:
        size = "intermediate_size" if text.get(_DENSE_SIZE) is not None else _EXPERT_SIZE
        names = [name for name in (_ALIASES[_EXPERTS], _EXPERTS) if name in text] or [_EXPERTS]
        fields |= {size: experts.expert_size, _CHOSEN: experts.top_k - experts.always}
        fields |= dict.fromkeys(names, experts.num_chosen)
    if _DENSE_FIRST in text:
        fields[_DENSE_FIRST] = sum(layer.experts is None for layer in arch.layers)
    return fields


def _dense_fields(config: Fields, size: int) -> Mapping[str, Any]:
    return {_DENSE_SIZE if config.has(_DENSE_SIZE) else "intermediate_size": size}


INKLING_TEXT = Family(
    model_type="inkling_text",
    architecture="InklingForCausalLM",
    qk_norm=True,
    windows=windows_by_layer_type,
    rotated_layers=no_layer,
    full_widths=_WIDTHS,
    facts=_facts,
    shapes=_shapes,
    implied=_implied,
    restated=_restated,
    dense_fields=_dense_fields,
    aliases=_ALIASES,
    mixture=Mixture(
        {},
        facts={"score": "sigmoid", "selection_bias": True, "renormalize": True, "one_output_scale": True},
        is_sparse=_is_sparse,
        state_sparse=state_types,
        read_more=_read_experts,
    ),
    outer_modules={
        "embed": "model.embed_tokens",
        "embed.norm": "model.embed_tokens.embed_norm",
        "norm": "model.norm",
        "head": "lm_head",
    },
    layer_modules={
        **LAYER_MODULES,
        "attn.relative": "self_attn.r_proj",
        "attn.profiles": "self_attn.rel_logits_proj.proj",
        "attn.k_conv": "self_attn.k_sconv.conv1d",
        "attn.v_conv": "self_attn.v_sconv.conv1d",
        "attn_conv": "attn_sconv.conv1d",
        "ffn_conv": "mlp_sconv.conv1d",
        "ffn.factor": "mlp.global_scale",
        "moe.router": "mlp.gate",
        "moe.selection_bias": "mlp.gate.e_score_correction_bias",
        "moe.factor": "mlp.gate.global_scale",
    },
    expert_layouts=(
        replace(
            AS_IN_MEMORY,
            always={part: f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
        ),
        apart("mlp.experts", methods=("compressed-tensors",)),
    ),
    known_fields=frozenset(
        {
            *_WINDOW_WIDTHS.values(),
            *(_WINDOW, _LOCAL, "layer_types", _TYPES, _DENSE_FIRST, _DENSE_SIZE, _EXPERT_SIZE),
            *(_EXPERTS, _CHOSEN, _SHARED, "route_scale", "d_rel", "rel_extent", _HEAD, _MULTIPLIER),
            *("log_scaling_n_floor", "log_scaling_alpha", _CONV_SIZE),
            # of layers that predict further tokens, which are not read, and of caches
            *("num_mtp_layers", "chain_hidden_post_norm", "mtp_hidden_states_first", "mtp_local_layer_ids"),
            "number_of_conv_states",
        }
    ),
    fixed_fields={
        "shared_expert_sink": True,
        "tie_word_embeddings": False,
        "use_sconv": True,
        "use_embed_norm": True,
        "use_gate_bias": True,
        "use_global_scale": True,
        "norm_after_topk": True,
        "gate_activation": "sigmoid",
        "q_bias": False,
        "o_bias": False,
    },
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,  # no layer has a rope
        "vocab_size": 201024,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 66,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 16,
        "swa_head_dim": 128,
        _WINDOW: 512,
        "d_rel": 16,
        "rel_extent": 1024,
        "log_scaling_alpha": 0.1,
        _CONV_SIZE: 4,
        _EXPERT_SIZE: 3072,
        _EXPERTS: 256,
        _CHOSEN: 6,
        _SHARED: 2,
        "route_scale": 8.0,
        _MULTIPLIER: 24.0,
    },
    ignored_tensors=r"rotary_emb\.inv_freq$|^model\.mtp\.",
)

FAMILIES.add("inkling_text", INKLING_TEXT)
