"""GPT-NeoX Japanese (ABEJA, 2022): GPT-NeoX with one half after the other and without biases of linears,
but for that of the output of attention in the last layer. Heads rotate as a whole where nothing else is
stated, the embedding is the head, and the width of FFNs is a multiple of the hidden size."""

from dataclasses import replace
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.archs.gpt_neox import implied_rope
from compress.models.family import FAMILIES, Family
from compress.models.layer_shape import LayerShape
from compress.models.limits import MAX_SIZE
from compress.models.module_names import LAYER_MODULES
from compress.untrusted.fields import Fields

_FACTOR = "intermediate_multiple_size"


def _facts(config: Fields) -> dict[str, Any]:
    return {"norm": "layer", "norm_bias": True}


def _implied(config: Fields) -> dict[str, Any]:
    """Return the rope, the heads of keys and values, and the width of FFNs, whatever is stated."""
    hidden_size = config.integer("hidden_size", 1, MAX_SIZE)
    factor = config.integer(_FACTOR, 1, MAX_SIZE // hidden_size)
    return {**implied_rope(config), "intermediate_size": factor * hidden_size}


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Return the layers, the last of which has a bias of what attention returns."""
    return (*layers[:-1], replace(layers[-1], o_bias=True))


def _restated(arch: Arch) -> dict[str, Any]:
    """Return the width of FFNs as a multiple of the hidden size.

    Raises:
        UnsupportedArch: another layer than the last has a bias, or the last has none, or FFNs have a width
            that is no such multiple.
    """
    if [layer.o_bias for layer in arch.layers] != [False] * (arch.num_layers - 1) + [True]:
        raise UnsupportedArch(
            f"in {arch.family} models the last layer, and no other, has a bias of the output of attention: "
            "keep the last layer."
        )
    widths = {layer.intermediate_size for layer in arch.layers}
    factor, rest = divmod(min(widths), arch.hidden_size)
    if rest or len(widths) > 1:
        raise UnsupportedArch(
            f"FFNs of this {arch.family} model have {min(widths)} channels, which its config states as a "
            f"multiple of the hidden size, {arch.hidden_size}: keep all channels."
        )
    return {_FACTOR: factor}


FAMILIES.add(
    "gpt_neox_japanese",
    Family(
        model_type="gpt_neox_japanese",
        architecture="GPTNeoXJapaneseForCausalLM",
        gated=False,
        heads_divide_hidden=True,
        heads_span_hidden=True,
        ffn_spans_hidden=True,
        facts=_facts,
        implied=_implied,
        shapes=_shapes,
        restated=_restated,
        dense_fields=lambda config, size: {},
        spelled={"rms_norm_eps": "layer_norm_eps"},
        rows_in_turns=frozenset({"attention.query_key_value"}),
        outer_modules={
            "embed": "gpt_neox_japanese.embed_in",
            "norm": "gpt_neox_japanese.final_layer_norm",
            "head": "embed_out",
        },
        layer_prefix="gpt_neox_japanese.layers.",
        layer_modules={
            **{name: disk for name, disk in LAYER_MODULES.items() if name != "ffn.gate"},
            "attn": "attention",
            **dict.fromkeys(("attn.q", "attn.k", "attn.v"), "attention.query_key_value"),
            "attn.o": "attention.dense",
            "attn.o.bias": "attention.dense_bias",
            "ffn.up": "mlp.dense_h_to_4h",
            "ffn.down": "mlp.dense_4h_to_h",
        },
        ignored_tensors=r"rotary_emb\.inv_freq$|attention\.(masked_)?bias$",  # of masks in older checkpoints
        known_fields=frozenset(
            {"layer_norm_eps", "partial_rotary_factor", "rotary_emb_base", "rotary_pct", _FACTOR}
        ),
        defaults={
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
            "layer_norm_eps": 1e-5,
            "rotary_emb_base": 10000.0,
            "rotary_pct": 1.0,
            "max_position_embeddings": 2048,
            _FACTOR: 4,
        },
    ),
)
