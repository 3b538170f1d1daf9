"""OPT and Galactica (Meta, arXiv 2205.01068, 2211.09085): learned positions, whose table has two rows before
the first position, LayerNorm with a bias before each half of a layer, or without weights, and FFNs without
gates, whose activation is relu or gelu. OPT-350M, which norms the stream after each half, is refused."""

from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.family import FAMILIES, Family
from compress.models.layer_types import no_layer
from compress.models.limits import MAX_SIZE
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

_OFFSET = 2
_EPS = 1e-5
"""The number that norms add to the variance in `transformers`; no field states it."""
NORMS_OF_OPT = {"norm": "layer", "norm_eps": _EPS, "position_offset": _OFFSET}


def _facts(config: Fields) -> dict[str, Any]:
    """Return the norms and the offset of positions.

    Raises:
        UnsupportedArch: the stream is normed after each half of a layer, or embeddings have another width.
    """
    if not config.flag("do_layer_norm_before"):
        raise UnsupportedArch(
            f"{config.where} has do_layer_norm_before = false, norms after each half of a layer as in "
            "OPT-350M, which are not supported; take another OPT."
        )
    hidden_size = config.integer("hidden_size", 1, MAX_SIZE)
    width = config.integer("word_embed_proj_dim", 1, MAX_SIZE, default=hidden_size)
    if width != hidden_size:
        raise UnsupportedArch(
            f"{config.where} has embeddings of {width} numbers (word_embed_proj_dim), which a linear turns "
            f"into {hidden_size}, as in OPT-350M, which is not supported; take another OPT."
        )
    has_weights = config.flag("layer_norm_elementwise_affine")
    norms = {"norm_bias": True} if has_weights else {"unit_norms": True}
    return {**NORMS_OF_OPT, **norms}


def _implied(config: Fields) -> dict[str, Any]:
    """Return as many heads of keys and values as of queries, whatever is stated."""
    return {"num_key_value_heads": config.integer("num_attention_heads", 1, MAX_SIZE)}


def _restated(arch: Arch) -> dict[str, Any]:
    """Return the width of embeddings, which a student of other hidden states has, too."""
    name = "word_embed_proj_dim"
    return {name: arch.hidden_size} if arch.config.get(name) is not None else {}


OPT = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    qkv_bias="enable_bias",
    o_bias="enable_bias",
    ffn_bias="enable_bias",
    gated=False,
    heads_divide_hidden=True,
    heads_span_hidden=True,
    rotated_layers=no_layer,
    facts=_facts,
    implied=_implied,
    restated=_restated,
    spelled={"hidden_act": "activation_function"},
    dense_size="ffn_dim",
    outer_modules={
        "embed": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "norm": "model.decoder.final_layer_norm",
        "head": "lm_head",
    },
    layer_prefix="model.decoder.layers.",
    layer_modules={
        **{name: disk for name, disk in LAYER_MODULES.items() if name != "ffn.gate"},
        "attn_norm": "self_attn_layer_norm",
        "attn.o": "self_attn.out_proj",
        "ffn_norm": "final_layer_norm",
        "ffn.up": "fc1",
        "ffn.down": "fc2",
    },
    other_prefixes={"decoder.": "model.decoder."},
    known_fields=frozenset(
        {
            "ffn_dim",
            "do_layer_norm_before",
            "word_embed_proj_dim",
            "enable_bias",
            "layer_norm_elementwise_affine",
            "dropout",
            "activation_dropout",
            "layerdrop",
            "init_std",
        }
    ),  # dropout is for training only
    fixed_fields={"_remove_final_layer_norm": False},
    defaults={
        "activation_function": "relu",
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
    },
)

FAMILIES.add("opt", OPT)
