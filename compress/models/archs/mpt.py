"""MPT (MosaicML, 2023): scores that fall with the distance of keys (ALiBi), LayerNorm without a bias, FFNs
without gates of four times the hidden size, whose activation is gelu, and no biases. Outputs of the linears
of queries, keys and values may be clipped. On disk these are one tensor. Models with learned positions, norms
of heads, one head of keys or another kind of norm are refused."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compress.models.alibi import Alibi
from compress.models.arch import Arch
from compress.models.archs.bloom import FFN_FACTOR, check_wide_ffn, wide_ffn
from compress.models.config_facts import IDLE_FIELDS, is_same, only_own_code
from compress.models.family import FAMILIES, Family
from compress.models.layer_shape import LayerShape
from compress.models.layer_types import no_layer
from compress.models.limits import CAPS, SCALES
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

_ATTENTION = "attn_config"
_FFN = "ffn_config"
_PLAIN_FFN = "mptmlp"
_GELU = {"name": "gelu", "approximate": "none"}
_CODE = ("MPTConfig", "MPTForCausalLM")
_NORMS = ("low_precision_layernorm", "layernorm")
"""The values of `norm_type` that differ in the dtype in which numbers are rounded."""
_FIXED: Mapping[str, Any] = {
    "alibi": True,
    "attn_type": "multihead_attention",
    "prefix_lm": False,
    "qk_ln": False,
    "attn_uses_sequence_id": False,
    "fused_qkv": True,
    "sliding_window_size": -1,
}
"""Fields of attention, and the value of each that the class in `transformers` computes whatever is stated.
LLM Foundry, by which models of this family are trained, states all of them."""
_FLOATS = ("clip_qkv", "softmax_scale")
_READ = {"alibi_bias_max", *_FLOATS}
_OF_ROPE = {"rope_theta", "rope_impl", "rope_dail_config", "rope_hf_config"}
"""Fields of rotated positions, which a model with ALiBi does not have, whatever they state."""
_IDLE = {"attn_impl", "attn_pdrop", "chunk_size_feed_forward", "is_encoder_decoder"} | _OF_ROPE | IDLE_FIELDS


def _attention(config: Fields) -> Fields:
    """Return the fields of attention.

    Raises:
        UnsupportedArch: one has another value than the one that is computed, or is unknown.
    """
    stated = config.fields(_ATTENTION, default={})
    for name, value in sorted(config.mapping(_ATTENTION, default={}).items()):
        if value is not None and name not in _READ | _IDLE and not is_same(value, _FIXED.get(name, False)):
            raise stated.wrong(name, value, repr(_FIXED.get(name, False)))
    return stated


def _check_ffn(config: Fields) -> None:
    """Check that FFNs are those of the class in `transformers`, which reads no field of them.

    Raises:
        UnsupportedArch: they have gates or another activation.
    """
    stated = config.fields(_FFN, default={})
    if stated.has("ffn_type") and stated.text("ffn_type") != _PLAIN_FFN:
        raise stated.wrong("ffn_type", stated.text("ffn_type"), _PLAIN_FFN)
    activation = stated.mapping("ffn_act_fn", default={})
    if {**_GELU, **activation} != _GELU:
        raise stated.wrong("ffn_act_fn", activation, f"{_GELU}")


def _facts(config: Fields) -> dict[str, Any]:
    """Return the norms, the bounds of queries, keys and values, and the factor of scores."""
    _check_ffn(config)
    if config.text("norm_type").lower() not in _NORMS:
        raise config.wrong("norm_type", config.text("norm_type"), " or ".join(_NORMS))
    attention = _attention(config)
    facts: dict[str, Any] = {"norm": "layer", "activation": "gelu"}
    if attention.has("clip_qkv") and attention.number("clip_qkv", 0, CAPS[1]):
        facts["qkv_clip"] = attention.number("clip_qkv", *CAPS)
    if attention.has("softmax_scale"):
        facts["attn_scale"] = attention.number("softmax_scale", *SCALES)
    return facts


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Return the layers with slopes of their heads."""
    largest = _attention(config).number("alibi_bias_max", 0, 1000, default=8)
    if not largest:
        raise _attention(config).wrong("alibi_bias_max", largest, "above 0")
    return tuple(replace(layer, alibi=Alibi(largest)) for layer in layers)


def _implied(config: Fields) -> dict[str, Any]:
    """Return the width of FFNs and the heads of keys and values; refuse code of a checkpoint's own but that
    which `transformers` took over."""
    only_own_code(config, _CODE)
    return wide_ffn(config)


def _restated(arch: Arch) -> dict[str, Any]:
    """Return the sizes of a model by the standard names that its config states, and numbers of attention that
    the class in `transformers` takes as floats alone.

    Raises:
        UnsupportedArch: FFNs have a width that no config states.
    """
    check_wide_ffn(arch)
    fields: dict[str, Any] = {}
    stated: Mapping[str, Any] = arch.config.get(_ATTENTION) or {}
    whole = {name: float(stated[name]) for name in _FLOATS if isinstance(stated.get(name), int)}
    if whole:
        fields[_ATTENTION] = {**stated, **whole}
    sizes = {
        "hidden_size": arch.hidden_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.layers[0].num_heads,
    }
    return fields | {name: value for name, value in sizes.items() if arch.config.get(name) is not None}


def _otherwise(arch: Arch) -> str | None:
    """Return what the class in `transformers` computes otherwise, None where it does not."""
    alibi = arch.layers[0].alibi
    if alibi is None or alibi.exponent == Alibi.exponent:
        return None
    return (
        f"Slopes of ALiBi follow alibi_bias_max = {alibi.exponent:g}, as in the model's own code; the class "
        f"of transformers takes {Alibi.exponent:g} for it."
    )


FAMILIES.add(
    "mpt",
    Family(
        model_type="mpt",
        architecture="MptForCausalLM",
        other_names=("MPTForCausalLM",),
        computed_otherwise=_otherwise,
        gated=False,
        heads_divide_hidden=True,
        heads_span_hidden=True,
        ffn_spans_hidden=True,
        rotated_layers=no_layer,
        facts=_facts,
        shapes=_shapes,
        implied=_implied,
        restated=_restated,
        dense_fields=lambda config, size: {},
        spelled={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        aliases={
            "d_model": "hidden_size",
            "max_position_embeddings": "max_seq_len",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
        },
        outer_modules={"embed": "transformer.wte", "norm": "transformer.norm_f", "head": "lm_head"},
        layer_prefix="transformer.blocks.",
        layer_modules={
            **{name: disk for name, disk in LAYER_MODULES.items() if name != "ffn.gate"},
            "attn_norm": "norm_1",
            "attn": "attn",
            **dict.fromkeys(("attn.q", "attn.k", "attn.v"), "attn.Wqkv"),
            "attn.o": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn.up": "ffn.up_proj",
            "ffn.down": "ffn.down_proj",
        },
        other_prefixes={f"{name}.": f"transformer.{name}." for name in ("wte", "blocks", "norm_f")},
        known_fields=frozenset(
            {
                _ATTENTION,
                _FFN,
                "auto_map",
                "layer_norm_epsilon",
                "norm_type",
                "emb_pdrop",
                "resid_pdrop",
                "init_config",
                "init_device",
                "embedding_fraction",  # of gradients
                "learned_pos_emb",  # not where there is ALiBi
                "tokenizer_name",
                "verbose",
            }
        ),
        fixed_fields={"expansion_ratio": FFN_FACTOR, "logit_scale": None, "no_bias": True},
        defaults={
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
            "layer_norm_epsilon": 1e-5,
            "norm_type": "low_precision_layernorm",
            "rope_theta": 10000.0,
            "max_position_embeddings": 2048,
        },
    ),
)
