"""GPT-Neo (EleutherAI, 2021) and TinyStories (Microsoft, arXiv 2305.07759): learned positions, LayerNorm with
a bias, layers that attend to all positions and layers that attend to a window, and scores without a factor.
FFNs have no gates, and their linears and the last one of attention have biases, those of queries, keys and
values none."""

from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.archs.gpt2 import GPT2, OTHER_HEADS
from compress.models.family import FAMILIES, Family
from compress.models.layer_types import no_layer
from compress.models.limits import MAX_LAYERS, MAX_POSITIONS, MAX_SIZE
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

_TYPES = "attention_types"
_BY_LAYER = "attention_layers"
_GLOBAL = "global"
_LOCAL = "local"
_TYPES_OF_DEFAULT = [[[_GLOBAL, _LOCAL], 12]]
"""The `attention_types` of configs without that field."""


def _recurring_types(config: Fields) -> list[str]:
    """Return the type of each layer by `attention_types`: pairs of some types and how often they recur.

    Raises:
        UnsupportedArch: the field has another form, or states more layers than any model has.
    """
    stated = config.items(_TYPES, default=_TYPES_OF_DEFAULT)
    types: list[str] = []
    for pair in stated:
        names, times = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (None, None)
        if not isinstance(names, list | tuple) or type(times) is not int or not 0 <= times <= MAX_LAYERS:
            raise config.wrong(_TYPES, stated, "a list of pairs: a list of types, and how often they recur")
        if len(types) + times * len(names) > MAX_LAYERS:
            raise config.wrong(_TYPES, stated, f"the types of at most {MAX_LAYERS} layers")
        types += [*names] * times
    return types


def _windows(config: Fields, num_layers: int) -> list[int | None]:
    """Return the window of each layer, None where it attends to all positions.

    Raises:
        UnsupportedArch: types are unknown, of another number of layers, or stated in two ways that differ.
    """
    types = config.texts(_BY_LAYER)
    if len(types) != num_layers:
        name = "num_hidden_layers"
        raise config.wrong(name, num_layers, f"{len(types)}, the layers whose types {_TYPES} states")
    if config.has(_TYPES) and _recurring_types(config) != types:
        raise config.wrong(_TYPES, config.items(_TYPES), f"the same types as in {_BY_LAYER}")
    if odd := sorted({*types} - {_GLOBAL, _LOCAL}):
        raise config.wrong(_TYPES, ", ".join(odd), f"{_GLOBAL} or {_LOCAL}")
    window = config.integer("sliding_window", 1, MAX_POSITIONS)
    return [window if kind == _LOCAL else None for kind in types]


def _facts(config: Fields) -> dict[str, Any]:
    return {"norm": "layer", "norm_bias": True, "position_offset": 0, "attn_scale": 1.0}


def _implied(config: Fields) -> dict[str, Any]:
    """Return as many heads of keys and values as of queries, whatever is stated, the width of the FFN, four
    times that of the hidden states where none is stated, and the type of each layer."""
    hidden_size = config.integer("hidden_size", 1, MAX_SIZE)
    return {
        "num_key_value_heads": config.integer("num_attention_heads", 1, MAX_SIZE),
        "intermediate_size": config.integer("intermediate_size", 1, MAX_SIZE, default=4 * hidden_size),
        _BY_LAYER: config.texts(_BY_LAYER) if config.has(_BY_LAYER) else _recurring_types(config),
    }


def _restated(arch: Arch) -> dict[str, Any]:
    """Return the types of the layers in both ways, where the config states those of other layers."""
    types = [_GLOBAL if layer.window is None else _LOCAL for layer in arch.layers]
    config = Fields(arch.config, "the source's config", UnsupportedArch)
    return {} if _recurring_types(config) == types else {_TYPES: [[types, 1]], _BY_LAYER: types}


FAMILIES.add(
    "gpt_neo",
    Family(
        model_type="gpt_neo",
        architecture="GPTNeoForCausalLM",
        o_bias=True,
        ffn_bias=True,
        gated=False,
        heads_divide_hidden=True,
        heads_span_hidden=True,
        windows=_windows,
        rotated_layers=no_layer,
        facts=_facts,
        implied=_implied,
        restated=_restated,
        spelled={
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "hidden_act": "activation_function",
            "rms_norm_eps": "layer_norm_epsilon",
            "sliding_window": "window_size",
        },
        outer_modules=GPT2.outer_modules,
        layer_prefix=GPT2.layer_prefix,
        layer_modules={
            **{
                name: disk.replace("self_attn.", "attn.attention.")
                for name, disk in LAYER_MODULES.items()
                if name != "ffn.gate"
            },
            "attn_norm": "ln_1",
            "attn": "attn.attention",
            "attn.o": "attn.attention.out_proj",
            "ffn_norm": "ln_2",
            "ffn.up": "mlp.c_fc",
            "ffn.down": "mlp.c_proj",
        },
        other_prefixes=GPT2.other_prefixes,
        ignored_tensors=r"\.attn\.attention\.(masked_)?bias$",  # of masks
        known_fields=frozenset(
            {
                _TYPES,
                _BY_LAYER,
                "layer_norm_epsilon",
                "resid_dropout",
                "embed_dropout",
                *OTHER_HEADS,
            }
        ),
        defaults={
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
            "layer_norm_epsilon": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 2048,
            "window_size": 256,
        },
    ),
)
