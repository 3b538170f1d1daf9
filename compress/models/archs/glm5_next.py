"""GLM-5.3 (Z.ai, 2026) with its vision tower, which is untouched. The residual of the text model is four
streams that half-layers read as mixtures, and the head reads their mean (`hyper_connection.py`). Most layers
have Kimi Delta Attention (arXiv 2510.26692) with decays that are bounded from below. The others have latent
attention without positions, and indexers that choose pools of keys (`key_pools.py`). The first layers are
dense, and the others have the experts of DeepSeek-V3; gates of all of them are capped before silu. The layer
that predicts a further token is not read.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.archs.glm4_moe import MIXTURE_MODULES, SIGMOID_MIXTURE
from compress.models.archs.glm_moe_dsa import KIND_FIELDS, indexer_kinds
from compress.models.delta_net import DeltaNet
from compress.models.family import FAMILIES, Family
from compress.models.hyper_connection import MAX_ITERATIONS, MAX_STREAMS, HyperConnections
from compress.models.indexer import Indexer
from compress.models.latent import MAX_RANK, Latent
from compress.models.latent_config import LATENT_MODULES, head_dim_of_latents
from compress.models.layer_shape import LayerShape
from compress.models.layer_types import FULL, LINEAR, no_layer
from compress.models.limits import CAPS, MAX_LAYERS, MAX_POSITIONS, MAX_SIZE
from compress.models.mixture import (
    BARE,
    DENSE_LAYER,
    SPARSE_LAYER,
    apart,
    check_dense_layers,
    in_one,
    sparse_by_both,
    state_both,
)
from compress.models.module_names import LAYER_MODULES
from compress.models.wrapper import LANGUAGE_MODEL_NAMES, wrapper
from compress.untrusted.fields import Fields

_TYPES = "layer_types"
_ATTENDING = ("indexed_attention", "deepseek_sparse_attention", FULL)
"""The types of layers with attention: as `transformers` writes it, as published, and the common one."""
_PERIOD = 4
"""Every fourth layer attends where a config states no types."""
_FIRST_DENSE = 3
"""So many layers are dense where a config states no types of FFNs."""
_LINEAR = "linear_attn_config"
_LISTS = {"full_attn_layers": True, "kda_layers": False}
"""The fields of that mapping that list layers by their index, and whether these attend."""
_WIDTHS = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""Fields of the class in `transformers`, and those of the mapping, which count where a config has both."""
_BOUND = "linear_lower_bound"
_OWN_BOUND = "gate_lower_bound"
"""The lowest log of a decay in configs of the class in `transformers`, and in the mapping."""
_SAFE_GATE = "safe_gate"
"""The field of the mapping by which decays have a bound that no field states."""
_SAFE_BOUND = 5.0
"""How far below 0 it may be where the mapping states that decays are bounded and not by how much."""
_LOWEST = 1e3
"""The largest bound below 0 that is read: exp(-1000) is 0 in every dtype."""
_OWN_FIELDS = {*_WIDTHS.values(), *_LISTS, _OWN_BOUND, _SAFE_GATE}
"""All fields of the mapping that are read."""
_POOL = "index_kpool"
_TOP_K = "index_topk"
_HYPER = {"weight": "fn", "bias": "base", "gains": "scale"}
"""The parameters of hyper-connections, and what their tensors are called."""
_FORGET = "self_attn.forget_gate"
_CONVS = dict.fromkeys(("delta.q_conv", "delta.k_conv", "delta.v_conv"), "self_attn.conv1d")
_STACKED = in_one("mlp.experts.gate_up_proj", "mlp.experts.down_proj", suffixes=BARE, modules=_CONVS)
"""The layout that `transformers` has in memory."""


def _bound_of(config: Fields, own: Fields) -> float:
    """Return how far below 0 the log of a decay may be.

    Raises:
        UnsupportedArch: decays have no bound.
    """
    stated, name = (own, _OWN_BOUND) if _OWN_BOUND in own else (config, _BOUND)
    if not stated.has(name):
        if config.has(_LINEAR) and own.flag(_SAFE_GATE, default=True):
            return _SAFE_BOUND
        raise config.wrong(_BOUND, None, "a number below 0; decays without a bound are not read here")
    bound = -stated.number(name, -_LOWEST, 0)
    if not bound:
        raise stated.wrong(name, 0, "below 0")
    return bound


def _delta_of(config: Fields) -> DeltaNet:
    """Return the widths of the delta nets of a config, in which one number is the dimension of keys and of
    values, and the width of the latents of decays and gates."""
    num_heads = config.integer("linear_num_heads", 1, MAX_SIZE)
    dim = config.integer("linear_head_dim", 1, MAX_SIZE)
    kernel_size = config.integer("linear_conv_kernel_dim", 1, MAX_SIZE)
    bound = -config.number(_BOUND, -_LOWEST, 0)
    return DeltaNet(num_heads, num_heads, dim, dim, kernel_size, rank=dim, by_channel=True, decay_bound=bound)


def _latent_of(config: Fields) -> Latent:
    """Return the latents of a config, whose heads have no dimension that rotates."""
    config.integer("qk_rope_head_dim", 0, 0)
    head_dim = head_dim_of_latents(config)
    if config.integer("qk_head_dim", 1, MAX_SIZE, default=head_dim) != head_dim:
        raise config.wrong("qk_head_dim", config.integer("qk_head_dim", 1, MAX_SIZE), f"{head_dim}")
    return Latent(
        q_rank=config.integer("q_lora_rank", 1, MAX_RANK),
        kv_rank=config.integer("kv_lora_rank", 1, MAX_RANK),
        rope_dim=0,
        value_dim=config.integer("v_head_dim", 1, MAX_SIZE),
        interleaved=False,
    )


def _facts(config: Fields) -> dict[str, Any]:
    check_dense_layers(config)
    return {
        "latent_eps": config.number("rms_norm_eps", 0, 1),
        "hyper": HyperConnections(
            num_streams=config.integer("hc_mult", 2, MAX_STREAMS),
            eps=config.number("hc_eps", 0, 1),
            sinkhorn_iterations=config.integer("hc_sinkhorn_iters", 1, MAX_ITERATIONS),
            mean_head=True,
        ),
    }


def _implied(config: Fields) -> dict[str, Any]:
    """Return the types of the layers, of their FFNs and of their indexers, and the widths of the delta nets,
    in the spelling of `transformers`; and for the dimension of heads, which nobody reads, what the class has
    in its place.

    Raises:
        UnsupportedArch: the mapping of linear attention has a field that is not read.
    """
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    own = config.fields(_LINEAR, default={})
    if others := sorted(set(own) - _OWN_FIELDS):
        raise config.wrong(_LINEAR, others, f"a mapping of {', '.join(sorted(_OWN_FIELDS))}")
    stated = {name: own.integer(theirs, 1, MAX_SIZE) for name, theirs in _WIDTHS.items() if own.has(theirs)}
    types = _types_of(config, own, num_layers)
    ffns = [DENSE_LAYER if idx < _FIRST_DENSE else SPARSE_LAYER for idx in range(num_layers)]
    return {
        **stated,
        _BOUND: -_bound_of(config, own),
        "head_dim": 0,
        _TYPES: types,
        "mlp_layer_types": config.texts("mlp_layer_types", default=ffns),
        "indexer_types": _kinds_of(config, types),
    }


def _types_of(config: Fields, own: Fields, num_layers: int) -> list[str]:
    """Return the types of the layers in the standard spelling.

    Raises:
        UnsupportedArch: a type is another one, or the lists of the mapping are of other layers.
    """
    by_default = [LINEAR if (idx + 1) % _PERIOD else FULL for idx in range(num_layers)]
    stated = config.texts(_TYPES, default=by_default)
    if odd := sorted(set(stated) - {LINEAR, *_ATTENDING}):
        raise config.wrong(_TYPES, odd, f"{LINEAR} or {_ATTENDING[0]}")
    types = [LINEAR if each == LINEAR else FULL for each in stated]
    for name, attends in _LISTS.items():
        wanted = [idx for idx, each in enumerate(types[:num_layers]) if (each == FULL) is attends]
        if own.has(name) and sorted(own.integers(name, 0, MAX_LAYERS)) != wanted:
            raise own.wrong(name, own.integers(name, 0, MAX_LAYERS), f"{wanted}, as {_TYPES} has them")
    return types


def _kinds_of(config: Fields, types: list[str]) -> list[str]:
    """Return whether the indexer of each layer is its own (`full`) or `shared` with the one before.

    Raises:
        UnsupportedArch: a layer shares the choice of one that has none, or that is not the one before it.
    """
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    kinds = indexer_kinds(config, num_layers)
    choosing = [kind == "full" and each == FULL for kind, each in zip(kinds, types, strict=False)]
    shared = [idx for idx, each in enumerate(types[:num_layers]) if each == FULL and not choosing[idx]]
    if odd := [idx for idx in shared if not idx or not choosing[idx - 1]]:
        wanted = "shared in layers that come after one with attention and an indexer of its own"
        raise config.wrong("indexer_types", f"shared in layer {odd[0]}", wanted)
    return kinds


def _indexer_of(config: Fields) -> Indexer:
    """Return the indexer of a layer with attention."""
    pool_size = config.integer(_POOL, 1, MAX_POSITIONS)
    budget = config.integer(_TOP_K, 1, MAX_POSITIONS)
    if budget % pool_size:
        raise config.wrong(_TOP_K, budget, f"a multiple of {_POOL}, {pool_size}")
    return Indexer(
        num_heads=config.integer("index_n_heads", 1, MAX_SIZE),
        head_dim=config.integer("index_head_dim", 1, MAX_SIZE),
        top_k=budget + pool_size - 1,
        pool_size=pool_size,
    )


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Return the layers with their indexers and the caps of their activations."""
    cap = config.number("swiglu_limit", *CAPS)
    indexer = _indexer_of(config)
    found = []
    for layer, kind in zip(layers, indexer_kinds(config, len(layers)), strict=True):
        if layer.experts is None:
            layer = replace(layer, ffn_cap=cap, caps_first=True)
        else:
            layer = replace(layer, ffn_cap=cap if layer.experts.shared_size else None, expert_cap=cap)
        if layer.latent is not None and kind == "full":
            layer = replace(layer, latent=replace(layer.latent, indexer=indexer))
        found.append(layer)
    return tuple(found)


def _restated(arch: Arch) -> dict[str, Any]:
    """Return the types of the layers as the source names those with attention, and the lists of layers in the
    mapping, where its config has them."""
    config = Fields(arch.config, "the config of this glm5_next model", UnsupportedArch)
    attends = [layer.attends for layer in arch.layers]
    restated: dict[str, Any] = {}
    if config.has(_TYPES):
        named = next((each for each in config.texts(_TYPES) if each != LINEAR), _ATTENDING[0])
        restated[_TYPES] = [named if each else LINEAR for each in attends]
    own = arch.config.get(_LINEAR)
    if isinstance(own, Mapping):
        lists = {
            name: [idx for idx, each in enumerate(attends) if each is attending]
            for name, attending in _LISTS.items()
            if name in own
        }
        restated[_LINEAR] = {**own, **lists}
    return restated


MIXTURE = replace(
    SIGMOID_MIXTURE,
    facts={**SIGMOID_MIXTURE.facts, "caps_first": True},
    is_sparse=sparse_by_both,
    state_sparse=state_both,
)
TEXT = Family(
    model_type="glm5_next_text",
    architecture="Glm5NextTextModel",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    rotated_layers=no_layer,
    latent=_latent_of,
    recurrence=_delta_of,
    facts=_facts,
    shapes=_shapes,
    implied=_implied,
    restated=_restated,
    mixture=MIXTURE,
    layer_modules={
        **LAYER_MODULES,
        **LATENT_MODULES,
        "delta.q": "self_attn.q_proj",
        "delta.k": "self_attn.k_proj",
        "delta.v": "self_attn.v_proj",
        "delta.q_conv": "self_attn.q_conv1d",
        "delta.k_conv": "self_attn.k_conv1d",
        "delta.v_conv": "self_attn.v_conv1d",
        "delta.beta": "self_attn.b_proj",
        "delta.decay_down": "self_attn.f_a_proj",
        "delta.decay": "self_attn.f_b_proj",
        "delta.dt_bias": "self_attn.dt_bias",
        "delta.A_log": "self_attn.A_log",
        "delta.gate_down": "self_attn.g_a_proj",
        "delta.gate": "self_attn.g_b_proj",
        "delta.norm": "self_attn.o_norm",
        "delta.o": "self_attn.o_proj",
        "attn.indexer.q": "self_attn.indexer.wq_b",
        "attn.indexer.k": "self_attn.indexer.wk",
        "attn.indexer.k_norm": "self_attn.indexer.k_norm",
        "attn.indexer.weights": "self_attn.indexer.weights_proj",
        "attn.indexer.pool_gate": "self_attn.indexer.index_kpool_compress_gate",
        "attn.indexer.pool_positions": "self_attn.indexer.index_kpool_compress_ape",
        **MIXTURE_MODULES,
        **{
            f"{half}_hyper.{ours}": f"hc_{half}_{theirs}"
            for half in ("attn", "ffn")
            for ours, theirs in _HYPER.items()
        },
    },
    expert_layouts=(apart("mlp.experts"), _STACKED),
    in_memory_inside={
        **{f"self_attn.{name}": f"{_FORGET}.{name}" for name in ("f_a_proj", "f_b_proj", "dt_bias", "A_log")},
        **{f"hc_{half}_{each}": f"{half}_hc.{each}" for half in ("attn", "ffn") for each in _HYPER.values()},
    },
    known_fields=KIND_FIELDS
    | {*MIXTURE.fields.values(), *_WIDTHS}
    | {
        "attention_bias",
        "first_k_dense_replace",
        "hc_eps",
        "hc_mult",
        "hc_sinkhorn_iters",
        "index_head_dim",
        "index_n_heads",
        "index_share_for_mtp_iteration",
        "indexer_rope_interleave",
        "mlp_layer_types",
        "n_shared_experts",
        "num_nextn_predict_layers",
        "swiglu_limit",
        _BOUND,
        _LINEAR,
        _POOL,
        _TOP_K,
        _TYPES,
    },
    fixed_fields={
        "hidden_act": "silu",
        "index_kpool_always_select_tail": True,
        "index_kpool_compress": True,
        "mhc": True,
        "mla_use_nope": True,
        "mlp_bias": False,
        "moe_router_dtype": "float32",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": 154880,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000.0,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "v_head_dim": 256,
        "n_routed_experts": 288,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
        "linear_head_dim": 128,
        "linear_num_heads": 64,
        "linear_conv_kernel_dim": 4,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "swiglu_limit": 10.0,
        _BOUND: -5.0,
        _POOL: 16,
        _TOP_K: 2048,
    },
)

FAMILIES.add(
    "glm5_next",
    wrapper("glm5_next", "Glm5NextForConditionalGeneration", TEXT, **LANGUAGE_MODEL_NAMES),
)
