"""GPT (OpenAI, 2018): learned positions, norms of the sums with the outputs of half-layers, FFNs without
gates of four times the hidden size, whose activation is gelu by tanh, and biases of all linears.

    x' = norm(x + f(x))      of each half-layer f, attention and FFN

is what the decoder computes with sums with the normed residual (`normed_sum.py`), whose factors are 1, where
the norm after a half-layer is that of what the next one reads: attention of the first layer reads the
embedding as it is, and the norm that ends the last layer is the last norm. On disk matrices are [I, O], and
those of queries, keys and values are one tensor."""

from dataclasses import replace
from typing import Any

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.archs.bloom import check_wide_ffn, wide_ffn
from compress.models.archs.gpt2 import DROPOUT, GPT2_SIZES, OTHER_HEADS
from compress.models.family import FAMILIES, Family
from compress.models.layer_shape import LayerShape
from compress.models.layer_types import no_layer
from compress.models.module_names import LAYER_MODULES
from compress.models.normed_sum import NormedSums
from compress.untrusted.fields import Fields

_ACTIVATIONS = {"gelu": "gelu_pytorch_tanh", "relu": "relu"}
"""Values of `afn`, and their names elsewhere; the class in `transformers` has silu, too."""


def _facts(config: Fields) -> dict[str, Any]:
    """Return the norms, the sums with them, the activation, and the offset of positions."""
    name = config.text("afn")
    if name not in _ACTIVATIONS:
        raise config.wrong("afn", name, f"one of {', '.join(_ACTIVATIONS)}")
    return {
        "norm": "layer",
        "norm_bias": True,
        "hyper": NormedSums(1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
        "activation": _ACTIVATIONS[name],
        "position_offset": 0,
    }


def _shapes(config: Fields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Return the layers, the first of which reads the embedding as it is."""
    return (replace(layers[0], bare_input=True), *layers[1:])


def _restated(arch: Arch) -> dict[str, Any]:
    """Return no fields.

    Raises:
        UnsupportedArch: another layer than the first reads what is not normed, or the first reads what is, or
            FFNs have a width that no config states.
    """
    check_wide_ffn(arch)
    if [layer.bare_input for layer in arch.layers] != [True] + [False] * (arch.num_layers - 1):
        raise UnsupportedArch(
            f"in {arch.family} models the first layer, and no other, reads what is not normed: keep the "
            "first layer."
        )
    return {}


FAMILIES.add(
    "openai-gpt",
    Family(
        model_type="openai-gpt",
        architecture="OpenAIGPTLMHeadModel",
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
        spelled={**GPT2_SIZES, "rms_norm_eps": "layer_norm_epsilon"},
        transposed=frozenset({"attn.q", "attn.k", "attn.v", "attn.o", "ffn.up", "ffn.down"}),
        outer_modules={
            "embed": "transformer.tokens_embed",
            "positions": "transformer.positions_embed",
            "head": "lm_head",
        },
        layer_prefix="transformer.h.",
        in_layer_before=frozenset({"attn_norm"}),
        layer_modules={
            **{name: disk for name, disk in LAYER_MODULES.items() if name != "ffn.gate"},
            "attn": "attn",
            **dict.fromkeys(("attn.q", "attn.k", "attn.v"), "attn.c_attn"),
            "attn.o": "attn.c_proj",
            "ffn_norm": "ln_1",
            "attn_norm": "ln_2",
            "ffn.up": "mlp.c_fc",
            "ffn.down": "mlp.c_proj",
        },
        other_prefixes={
            f"{name}.": f"transformer.{name}." for name in ("tokens_embed", "positions_embed", "h")
        },
        ignored_tensors=r"\.attn\.bias$|position_ids$",  # of masks, and positions
        known_fields=frozenset({"afn", "layer_norm_epsilon", *OTHER_HEADS, *DROPOUT}),
        defaults={
            "afn": "gelu",
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
            "layer_norm_epsilon": 1e-5,
            "rope_theta": 10000.0,
            "n_positions": 512,
        },
    ),
)
