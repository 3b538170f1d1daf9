"""BLOOM and BLOOMZ (BigScience, arXiv 2211.05100, 2211.01786): scores that fall with the distance of keys
(ALiBi), LayerNorm with a bias, of the embedding, too, FFNs without gates of four times the hidden size, whose
activation is gelu by tanh, and biases of all linears. On disk the rows of queries, keys and values take turns
by head. Models that add the outputs of half-layers to what their norms return are refused, and so is
`slow_but_exact`, by which `transformers` leaves biases out."""

from dataclasses import replace
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.alibi import Alibi
from compress.models.arch import Arch
from compress.models.family import FAMILIES, Family
from compress.models.layer_shape import LayerShape
from compress.models.layer_types import no_layer
from compress.models.limits import MAX_SIZE
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

FFN_FACTOR = 4
"""The width of an FFN by the hidden size, which no field states."""


def _facts(config: Fields) -> dict[str, Any]:
    return {
        "norm": "layer",
        "norm_bias": True,
        "embed_norm": True,
        "embed_norm_weight": True,
        "activation": "gelu_pytorch_tanh",
    }


def wide_ffn(config: Fields) -> dict[str, Any]:
    """Return the width of FFNs, and as many heads of keys and values as of queries, whatever is stated."""
    return {
        "num_key_value_heads": config.integer("num_attention_heads", 1, MAX_SIZE),
        "intermediate_size": FFN_FACTOR * config.integer("hidden_size", 1, MAX_SIZE),
    }


def check_wide_ffn(arch: Arch) -> None:
    """Check that FFNs have the one width that the class in `transformers` builds.

    Raises:
        UnsupportedArch: one has another.
    """
    wide = FFN_FACTOR * arch.hidden_size
    other = next((each.intermediate_size for each in arch.layers if each.intermediate_size != wide), None)
    if other is not None:
        raise UnsupportedArch(
            f"an FFN of this {arch.family} model has {other} channels, and its class in transformers has "
            f"{FFN_FACTOR} times the hidden size, {wide}: keep all channels."
        )


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Return the layers with slopes of their heads."""
    return tuple(replace(layer, alibi=Alibi(as_powers=True)) for layer in layers)


def _restated(arch: Arch) -> dict[str, Any]:
    """Return the sizes of a model by the older names that its config states.

    Raises:
        UnsupportedArch: FFNs have a width that no config states.
    """
    check_wide_ffn(arch)
    sizes = {
        "n_embed": arch.hidden_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.layers[0].num_heads,
    }
    return {name: value for name, value in sizes.items() if arch.config.get(name) is not None}


FAMILIES.add(
    "bloom",
    Family(
        model_type="bloom",
        architecture="BloomForCausalLM",
        qkv_bias=True,
        o_bias=True,
        ffn_bias=True,
        gated=False,
        heads_divide_hidden=True,
        heads_span_hidden=True,
        ffn_spans_hidden=True,
        rotated_layers=no_layer,
        facts=_facts,
        shapes=_shapes,
        implied=wide_ffn,
        restated=_restated,
        dense_fields=lambda config, size: {},
        spelled={
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        aliases={
            "hidden_size": "n_embed",
            "max_position_embeddings": "seq_length",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
        },
        rows_in_turns=frozenset({"self_attention.query_key_value"}),
        outer_modules={
            "embed": "transformer.word_embeddings",
            "embed.norm": "transformer.word_embeddings_layernorm",
            "norm": "transformer.ln_f",
            "head": "lm_head",
        },
        layer_prefix="transformer.h.",
        layer_modules={
            **{name: disk for name, disk in LAYER_MODULES.items() if name != "ffn.gate"},
            "attn": "self_attention",
            **dict.fromkeys(("attn.q", "attn.k", "attn.v"), "self_attention.query_key_value"),
            "attn.o": "self_attention.dense",
            "ffn.up": "mlp.dense_h_to_4h",
            "ffn.down": "mlp.dense_4h_to_h",
        },
        other_prefixes={
            f"{name}.": f"transformer.{name}."
            for name in ("word_embeddings", "word_embeddings_layernorm", "h", "ln_f")
        },
        known_fields=frozenset(
            {
                "layer_norm_epsilon",
                "pretraining_tp",  # in how many parts sums are added where `slow_but_exact`
            }
        ),
        fixed_fields={"apply_residual_connection_post_layernorm": False, "slow_but_exact": False},
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "layer_norm_epsilon": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 2048,
        },
    ),
)
