"""Types of layers: which of them see a window only, and which encode positions, as configs state it.

A family chooses one of these readers for its table, or has one of its own.
"""

from collections.abc import Callable
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.limits import MAX_LAYERS, MAX_POSITIONS
from compress.untrusted.fields import Fields

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
LINEAR = "linear_attention"
ONLY_FFN = ("mlp", "moe")
"""Types of layers that have an FFN, or experts, and nothing that mixes positions; where a family has them,
the other layers have no FFN."""
FIELDS_BY_LAYER = (
    "layer_types",
    "attention_layers",
    "layers_block_type",
    "hybrid_override_pattern",
    "mlp_layer_types",
    "hybrid_layer_pattern",
    "moe_layer_freq",
    "no_rope_layers",
    "layer_rope_theta",
    "moe_topk",
    "num_shared_expert",
    "moe_intermediate_size",
    "num_attention_heads_per_layer",
    "indexer_types",
    "attn_type_list",
    "index_topk_pattern",
    "expert_swiglu_limit_list",
    "share_expert_swiglu_limit_list",
    "swiglu_limits",
    "swiglu_limits_shared",
    "rope_theta",
    "partial_rotary_factors",
)
"""Fields that have an entry, or a letter, for each layer, the last ones in some configs only."""
TYPES_BY_LAYER = ("layer_types", "attention_layers")
"""Fields that state which layers have a window."""
INDICES_OF_LAYERS = ("attn_layer_indices", "full_attn_idxs", "local_layer_ids", "rope_scaling_layers")
"""Fields that list layers by their index."""
PERIODS_OF_LAYERS = ("attn_layer_period",)
"""Fields that state layers by the period with which they recur."""


def after_last(stated: object, num_layers: object, like: list[Any] | str) -> Any:
    """Return the entries of a field by layer after those of so many layers, which are of layers that predict
    further tokens; none where it is stated otherwise than `like`."""
    if not isinstance(num_layers, int) or type(stated) is not type(like):
        return like[:0]
    assert isinstance(stated, list | str)
    return stated[num_layers:]


Windows = Callable[[Fields, int], list[int | None]]
"""(config, number of layers) -> the sliding window of each layer, None where it sees all positions."""
RotatedLayers = Callable[[Fields, int], list[bool]]
"""(config, number of layers) -> whether a layer encodes positions."""


def no_window(config: Fields, num_layers: int) -> list[int | None]:
    return [None] * num_layers


def every_layer(config: Fields, num_layers: int) -> list[bool]:
    return [True] * num_layers


def no_layer(config: Fields, num_layers: int) -> list[bool]:
    return [False] * num_layers


def windows_by_layer_type(config: Fields, num_layers: int) -> list[int | None]:
    """Return the sliding windows of families that state `layer_types` (or, before that field existed,
    `max_window_layers`)."""
    window = one_window(config) if config.flag("use_sliding_window", default=True) else None
    first = config.integer("max_window_layers", 0, MAX_POSITIONS, default=0)
    if config.has("layer_types"):
        return [window if kind == SLIDING else None for kind in layer_types(config, num_layers)]
    return [window if idx >= first else None for idx in range(num_layers)]


def stated_windows_by_layer_type(config: Fields, num_layers: int) -> list[int | None]:
    """Return the sliding windows of families whose configs of `transformers` have a number for them always.

    Raises:
        UnsupportedArch: the window is null.
    """
    if not config.has("sliding_window"):
        raise config.wrong("sliding_window", None, "a number of positions: this family has no other windows")
    return windows_by_layer_type(config, num_layers)


def same_window(config: Fields, num_layers: int) -> list[int | None]:
    """Return the one sliding window of families that have it in every layer."""
    return [one_window(config)] * num_layers


def every_nth_full(config: Fields, period: int, others: str = SLIDING) -> dict[str, Any]:
    """Return the `layer_types` of a config; where it states none, every `period`-th has full attention, and
    all the `others` have that type."""
    if config.has("layer_types"):
        return {}
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    return {"layer_types": [others if idx % period else FULL for idx in range(1, num_layers + 1)]}


def rope_by_layer_type(config: Fields, full_theta: float, sliding_theta: float) -> dict[str, Any]:
    """Return `rope_parameters` of families that scale the rope of full attention only, and whose older
    configs state it in `rope_scaling`."""
    stated = config.fields("rope_parameters", default={})
    if odd := sorted(set(stated) - {FULL, SLIDING}):
        raise config.wrong("rope_parameters", ", ".join(odd), f"one mapping each for {FULL} and {SLIDING}")
    scaling = config.mapping("rope_scaling", default={})
    return {
        "rope_parameters": {
            FULL: {"rope_theta": full_theta, **scaling, **stated.mapping(FULL, default={})},
            SLIDING: {"rope_theta": sliding_theta, **stated.mapping(SLIDING, default={})},
        }
    }


def one_window(config: Fields) -> int | None:
    """Return the sliding window that a config states, None where it states none."""
    return config.integer("sliding_window", 1, MAX_POSITIONS) if config.has("sliding_window") else None


def chunk_of(config: Fields, kind: str) -> int | None:
    """Return the positions of a chunk that layers of a type attend in, None for those without chunks. Their
    size is a field that only families with chunks read."""
    if kind != CHUNKED:
        return None
    if not config.has("attention_chunk_size"):
        raise config.wrong("layer_types", CHUNKED, "beside an attention_chunk_size, in a family that has one")
    return config.integer("attention_chunk_size", 1, MAX_POSITIONS)


def layer_types(config: Fields, num_layers: int) -> list[str]:
    """Return the type of each layer; a pruned model may list more than it has."""
    types = config.texts("layer_types", default=())
    if not types:
        return [FULL] * num_layers
    unknown = sorted(set(types) - {FULL, SLIDING, CHUNKED, LINEAR, *ONLY_FFN})
    if unknown:
        known = ", ".join((FULL, SLIDING, CHUNKED, LINEAR, *ONLY_FFN))
        raise UnsupportedArch(f"config.json names layer_types {unknown}; known: {known}.")
    if len(types) < num_layers:
        raise config.wrong("layer_types", types, f"a list of {num_layers} layer types")
    return types[:num_layers]
