"""The text model of MiniMax-M3 (MiniMax, 2026): gates of FFNs and experts are clamped, as in gpt-oss, a part
of each head rotates, and experts are chosen by the sigmoids of the router with a bias that their weights do
not have, next to a shared one. Layers may have an indexer that chooses blocks of keys (`block_choice.py`).

Published configs state which layers have an indexer or experts by fields of their own
(`sparse_attention_config`, `moe_layer_freq`), and those that `transformers` writes by types of layers. A
config in which the two differ is refused. A checkpoint of the text model alone names its modules as
`transformers` has them in memory. The layers that predict further tokens are not read.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compress.models.arch import Arch
from compress.models.family import FAMILIES, Family
from compress.models.ffn import CLAMPED, SWIGLU_ALPHA, SWIGLU_LIMIT
from compress.models.indexer import BlockIndexer
from compress.models.layer_shape import LayerShape
from compress.models.layer_types import FULL
from compress.models.limits import MAX_LAYERS, MAX_POSITIONS, MAX_SIZE
from compress.models.mixture import AS_IN_MEMORY, Mixture, apart, sparse_by_type, state_types
from compress.models.module_names import LAYER_MODULES, STACKED_GATE_UP
from compress.untrusted.fields import Fields

_SPARSE = "minimax_m3_sparse"
"""The type of layers with an indexer."""
_TYPES = "layer_types"
_FFN_TYPES = "mlp_layer_types"
_FFN_FLAGS = "moe_layer_freq"
"""The field of published configs that has a 1 for each layer with experts, else a 0."""
_INDEXERS = "sparse_attention_config"
"""The field of published configs that states the indexers."""
_FLAGS = "sparse_attention_freq"
_WITHOUT_VALUES = "sparse_disable_index_value"
"""The fields of indexers that have a 1 for each layer with one, and for each whose indexer has no values."""
_NUM_HEADS = "index_n_heads"
_LOCAL = "index_local_blocks"
_OF_INDEXERS = {
    _NUM_HEADS: "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    _LOCAL: "sparse_local_block",
}
"""Fields of indexers -> their names among those of published configs, which decide where both are stated."""
_ALWAYS = "sparse_init_block"
"""The field of the first blocks that are always chosen, of which `transformers` has none."""
_SCORE = "sparse_score_type"
_CHOOSING = frozenset({"use_sparse_attention", _SCORE, _ALWAYS})
"""Fields of published configs that state how indexers choose, in one way each here."""
_BIAS = "e_score_correction_bias"
_SHARED = "mlp.shared_experts"
_ACTIVATIONS = ("silu", "swigluoai")
"""The names that configs have for the clamped gate."""
_FIELDS = {
    "num_experts": "num_local_experts",
    "top_k": "num_experts_per_tok",
    "expert_size": "intermediate_size",
    "shared_size": "shared_intermediate_size",
    "scale": "routed_scaling_factor",
}


def _are_sparse(config: Fields, num_layers: int) -> list[bool]:
    """Return which layers have experts. Refuse a config that states it in two ways that differ."""
    if not config.has(_FFN_FLAGS):
        return sparse_by_type(config, num_layers)
    flags = config.integers(_FFN_FLAGS, 0, 1)
    found = [flag == 1 for flag in flags[:num_layers]]
    if len(found) < num_layers:
        raise config.wrong(_FFN_FLAGS, flags, f"{num_layers} times 0 or 1")
    if config.has(_FFN_TYPES) and found != sparse_by_type(config, num_layers):
        raise config.wrong(_FFN_FLAGS, flags, f"those of {_FFN_TYPES}")
    return found


def _state_sparse(is_sparse: list[bool]) -> dict[str, Any]:
    return {**state_types(is_sparse), _FFN_FLAGS: [int(each) for each in is_sparse]}


def _have_indexers(config: Fields, stated: Fields) -> list[int]:
    """Return a 1 for each layer with an indexer, else a 0. Refuse a config that states it in two ways that
    differ."""
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    types = config.texts(_TYPES, default=())
    if unknown := sorted(set(types) - {FULL, _SPARSE}):
        raise config.wrong(_TYPES, unknown, f"{FULL} or {_SPARSE}")
    by_type = [int(kind == _SPARSE) for kind in types]
    if not stated.has(_FLAGS):
        return by_type or [0] * num_layers
    flags = stated.integers(_FLAGS, 0, 1)
    if len(flags) < num_layers:
        raise stated.wrong(_FLAGS, flags, f"{num_layers} times 0 or 1")
    if len(types) >= num_layers and by_type[:num_layers] != flags[:num_layers]:
        raise stated.wrong(_FLAGS, flags, f"those of {_TYPES}")
    return by_type or flags


def _implied(config: Fields) -> dict[str, Any]:
    """Return the fields of indexers in the standard spelling, which layers have one, and the types of layers
    without them. Refuse indexers that have values, which the decoder does not add, and a size of heads that
    is `null`, which `transformers` refuses, too."""
    if not config.has("head_dim"):
        raise config.wrong("head_dim", None, "a whole number, or absent where it is 128")
    activation = config.text("hidden_act")
    if activation not in _ACTIVATIONS:
        raise config.wrong("hidden_act", activation, " or ".join(_ACTIVATIONS))
    stated = config.fields(_INDEXERS, default={})
    if odd := sorted(set(stated) - {*_OF_INDEXERS.values(), _FLAGS, _WITHOUT_VALUES, *_CHOOSING}):
        raise stated.wrong(odd[0], "a field", "absent: no field of these indexers has that name")
    if not stated.flag("use_sparse_attention", default=True):
        raise stated.wrong("use_sparse_attention", False, f"true, or {_INDEXERS} absent")
    if stated.text(_SCORE, default="max") != "max":
        raise stated.wrong(_SCORE, stated.text(_SCORE), "max")
    stated.integer(_ALWAYS, 0, 0, default=0)
    flags = _have_indexers(config, stated)
    without_values = stated.integers(_WITHOUT_VALUES, 0, 1) if stated.has(_WITHOUT_VALUES) else flags
    if any(has_one and not is_bare for has_one, is_bare in zip(flags, without_values, strict=False)):
        raise stated.wrong(_WITHOUT_VALUES, without_values, "1 in each layer with an indexer")
    implied: dict[str, Any] = {
        "hidden_act": "silu",
        _INDEXERS: {**config.mapping(_INDEXERS, default={}), _FLAGS: flags},
    }
    if config.has(_TYPES):
        implied[_TYPES] = [FULL] * len(flags)
    for ours, theirs in _OF_INDEXERS.items():
        if stated.has(theirs):
            implied[ours] = stated.integer(theirs, 0, MAX_POSITIONS)
    return implied


def _facts(config: Fields) -> dict[str, Any]:
    """Return the facts of gates and norms."""
    del config
    return {"activation": CLAMPED, "norm_offset": 1.0}


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Return the layers with their indexers. Refuse a number of dimensions that rotate which is not that of
    the rope: `transformers` reads the rope, and other programs read that number."""
    rotated = {layer.rope.rotary_dim or layer.head_dim for layer in layers if layer.rope is not None}
    stated = config.integer("rotary_dim", 2, MAX_SIZE, default=max(rotated))
    if {stated} != rotated:
        raise config.wrong("rotary_dim", stated, f"{max(rotated)}, by partial_rotary_factor of the rope")
    indexer = BlockIndexer(
        num_heads=config.integer(_NUM_HEADS, 1, MAX_SIZE),
        head_dim=config.integer("index_head_dim", 1, MAX_SIZE),
        block_size=config.integer("index_block_size", 1, MAX_POSITIONS),
        top_blocks=config.integer("index_topk_blocks", 1, MAX_POSITIONS),
        local_blocks=config.integer(_LOCAL, 1, MAX_POSITIONS),
    )
    return tuple(
        replace(layer, block_indexer=indexer if has_one else None)
        for layer, has_one in zip(layers, config.fields(_INDEXERS).integers(_FLAGS, 0, 1), strict=False)
    )


def _restated(arch: Arch) -> dict[str, Any]:
    """Return which layers have an indexer and how many heads indexers have, by the fields that a config
    states."""
    flags = [int(layer.block_indexer is not None) for layer in arch.layers]
    heads = next((layer.block_indexer.num_heads for layer in arch.layers if layer.block_indexer), None)
    stated: Mapping[str, Any] = arch.config.get(_INDEXERS) or {}
    own = {_FLAGS: flags, _WITHOUT_VALUES: flags, _OF_INDEXERS[_NUM_HEADS]: heads}
    fields: dict[str, Any] = {}
    if stated:
        written = {
            name: value for name, value in own.items() if stated.get(name) is not None and value is not None
        }
        fields[_INDEXERS] = {**stated, **written}
    if arch.config.get(_TYPES):
        fields[_TYPES] = [_SPARSE if flag else FULL for flag in flags]
    if heads is not None and (_NUM_HEADS in arch.config or _OF_INDEXERS[_NUM_HEADS] not in stated):
        fields[_NUM_HEADS] = heads
    return fields


MINIMAX_M3 = Family(
    model_type="minimax_m3_vl_text",
    architecture="MiniMaxM3VLForCausalLM",
    qk_norm=True,
    facts=_facts,
    implied=_implied,
    shapes=_shapes,
    restated=_restated,
    dense_size="dense_intermediate_size",
    mixture=Mixture(
        _FIELDS,
        facts={"score": "sigmoid", "selection_bias": True, "renormalize": True},
        is_sparse=_are_sparse,
        state_sparse=_state_sparse,
    ),
    layer_modules={
        **LAYER_MODULES,
        **STACKED_GATE_UP,
        **{f"attn.indexer.{name}": f"self_attn.indexer.{name}_proj" for name in ("q", "k")},
        **{f"attn.indexer.{name}": f"self_attn.indexer.{name}" for name in ("q_norm", "k_norm")},
        "moe.router": "mlp.gate",
        "moe.selection_bias": f"mlp.gate.{_BIAS}",
        "moe.shared.gate": f"{_SHARED}.gate_up_proj",
        "moe.shared.up": f"{_SHARED}.gate_up_proj",
        "moe.shared.down": f"{_SHARED}.down_proj",
    },
    expert_layouts=(AS_IN_MEMORY, apart("mlp.experts", methods=("compressed-tensors",))),
    ignored_tensors=r"rotary_emb\.inv_freq$|(^|\.)mtp\.",
    known_fields=frozenset(
        {
            *_FIELDS.values(),
            *_OF_INDEXERS,
            _INDEXERS,
            _TYPES,
            _FFN_TYPES,
            _FFN_FLAGS,
            "dense_intermediate_size",
            "partial_rotary_factor",
            "rotary_dim",
        }
    ),
    fixed_fields={
        "n_shared_experts": 1,
        "qk_norm_type": "per_head",
        "scoring_func": "sigmoid",
        "swiglu_alpha": SWIGLU_ALPHA,
        "swiglu_limit": SWIGLU_LIMIT,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    defaults={
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000.0,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 3072,
        "dense_intermediate_size": 12288,
        "shared_intermediate_size": 3072,
        "max_position_embeddings": 524288,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.0,
        _NUM_HEADS: 4,
        "index_head_dim": 128,
        "index_block_size": 128,
        "index_topk_blocks": 16,
        _LOCAL: 1,
    },
)

FAMILIES.add("minimax_m3_vl_text", MINIMAX_M3)
