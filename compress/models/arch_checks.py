"""Checks of the facts of an architecture: that they fit one another, and that the decoder computes them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from compress.errors import UnsupportedArch
from compress.models.gated_sum import GatedSums
from compress.models.layer_checks import why_layer_unfit
from compress.models.layer_shape import GATED_OR_NOT, UNGATED, XIELU, LayerShape
from compress.models.normed_sum import NormedSums
from compress.models.shortcut import Shortcuts
from compress.models.stream_checks import why_no_altup, why_no_ngrams, why_no_streams

if TYPE_CHECKING:
    from compress.models.arch import Arch

ACTIVATIONS = ("silu", *GATED_OR_NOT, "swiglu_clamped", *UNGATED)
"""The activations, by their names in `transformers`."""

FACTORED = frozenset(
    {"attn.o", "ffn.gate", "ffn.down", *(f"mamba.{name}" for name in ("gate", "x", "B", "C", "dt", "o"))}
)
"""The linears whose outputs may have a factor."""
_OF_BIASES = ("pre", "parallel")
"""The blocks in which norms may have a bias."""
_OF_RECURRENCES = ("pre", "sandwich")
"""The blocks in which a recurrence may be in place of attention."""


_STREAMS = "the residual is several streams"
_WHAT_OF_STREAMS: Mapping[type, str] = {
    GatedSums: "outputs of half-layers have gates",
    NormedSums: "outputs of half-layers are added to the normed residual",
}
"""The sentences of messages that describe residuals other than plain sums, by the class of their facts."""


def check_arch(arch: "Arch") -> None:
    """Check that the decoder computes a model.

    Raises:
        UnsupportedArch: it does not; the message names the fact, and the layer if it is one of a layer.
    """
    if arch.activation not in ACTIVATIONS:
        raise UnsupportedArch(
            f"activation '{arch.activation}' is not known to the decoder; it knows {', '.join(ACTIVATIONS)}."
        )
    if arch.attn_scale == 0:
        raise UnsupportedArch("the factor of attention scores is 0; it must be another number.")
    if arch.rotates_first and (arch.whole_qk_norm or arch.unit_qk_norm):
        raise UnsupportedArch(
            "norms of q and k that follow the rotation are those of single heads, with weights."
        )
    if arch.own_qk_norm and (arch.whole_qk_norm or not arch.qk_norm):
        raise UnsupportedArch("norms with a weight for each head are those of single heads of q and k.")
    of_single_heads = arch.qk_norm and not (arch.own_qk_norm or arch.whole_qk_norm)
    if arch.qk_norm_bias and (arch.norm != "layer" or not of_single_heads):
        raise UnsupportedArch(
            "norms of q and k have a bias; the decoder computes it in norm 'layer' of single heads, with "
            "weights that all heads share."
        )
    if arch.layer_embed_size and arch.block != "sandwich":
        raise UnsupportedArch(
            f"tokens have embeddings for each layer in a '{arch.block}' block; the decoder reads them in "
            "a 'sandwich' block."
        )
    if arch.layer_embed_size and arch.embed_norm:
        raise UnsupportedArch(
            "tokens have embeddings for each layer, and the embedding is normed; no decoder here reads both."
        )
    if arch.layer_embed_size and arch.activation in UNGATED:
        raise UnsupportedArch(
            f"tokens have embeddings for each layer and the activation is '{arch.activation}'; what a layer "
            "reads of them has a gate, whose activation is another."
        )
    if arch.layer_embed_size and arch.position_offset is not None:
        raise UnsupportedArch(
            "tokens have embeddings for each layer, and positions have learned ones; no decoder here reads "
            "both."
        )
    if arch.sinusoidal_positions and (
        arch.position_offset is None or arch.hidden_size % 2 or arch.hidden_size < 4
    ):
        raise UnsupportedArch(
            f"positions are sinusoidal, with a hidden size of {arch.hidden_size} and a first row of "
            f"{arch.position_offset}; the decoder computes them for an even hidden size of at least 4, from "
            "a stated row on."
        )
    if arch.norm_bias and (arch.norm != "layer" or arch.block not in _OF_BIASES):
        raise UnsupportedArch(
            f"norms have a bias, and are '{arch.norm}' in a '{arch.block}' block; the decoder computes norm "
            f"'layer' with a bias in a block {' or '.join(map(repr, _OF_BIASES))}."
        )
    if arch.unit_norms and (arch.block != "pre" or arch.norm_bias or arch.norm_offset):
        raise UnsupportedArch(
            f"norms have no weights in a '{arch.block}' block, or something is added to them; the decoder "
            "computes such norms as they are, in a 'pre' block."
        )
    if arch.head_bias and arch.tied_head:
        raise UnsupportedArch(
            "the head has a bias and is the embedding; the decoder computes a bias of a head that has a "
            "matrix of its own."
        )
    if arch.windowed_sinks and not arch.attn_sinks:
        raise UnsupportedArch("layers with a window alone have attention sinks, and the model has none.")
    if arch.own_ffn_norm and arch.block != "parallel":
        raise UnsupportedArch(
            f"the FFN has a norm of its own in a '{arch.block}' block; that is a fact of a 'parallel' block, "
            "whose halves share one norm otherwise."
        )
    if other := sorted(name for name, _ in arch.linear_factors if not _may_have_factor(arch, name)):
        raise UnsupportedArch(
            f"factors of {', '.join(other)}, which no layer of this model has, or which the runtime computes "
            "without one."
        )
    if arch.recurrent_block not in (None, arch.block) and (
        "parallel" in (arch.block, arch.recurrent_block) or arch.residual_scale != 1
    ):
        raise UnsupportedArch(
            f"layers with a recurrence are '{arch.recurrent_block}' blocks, and the others are "
            f"'{arch.block}' blocks, with a residual scale of {arch.residual_scale:g}; the runtime computes "
            "both kinds where no halves run side by side and that scale is 1."
        )
    if arch.learned_growth and (arch.query_growth is not None or not arch.has_latents):
        raise UnsupportedArch(
            "queries grow by parameters of the layers, and by a factor of the model, too, or without "
            "latents; the runtime computes the first alone, with latent attention."
        )
    if arch.hyper is not None and (reason := why_no_streams(arch)):
        raise UnsupportedArch(f"{_WHAT_OF_STREAMS.get(type(arch.hyper), _STREAMS)}, and {reason}.")
    if (arch.altup_streams or arch.laurel_rank) and (reason := why_no_altup(arch)):
        raise UnsupportedArch(f"the model has AltUp or LAuReL, and {reason}.")
    if arch.head_vocab >= arch.vocab_size:
        raise UnsupportedArch(
            f"{arch.head_vocab} tokens have logits, and the model has {arch.vocab_size}; that is a fact of "
            "models of which some have none."
        )
    if arch.embed_norm_weight and not arch.embed_norm:
        raise UnsupportedArch("the norm of the embedding has a weight, and the embedding is not normed.")
    most = arch.vocab_size if arch.layer_embed_size else 0
    if arch.layer_embed_vocab > most:
        raise UnsupportedArch(
            f"{arch.layer_embed_vocab} tokens have embeddings for each layer, and the model has "
            f"{arch.vocab_size} tokens, or no such embeddings."
        )
    if arch.has_ngrams and (reason := why_no_ngrams(arch)):
        raise UnsupportedArch(f"layers have embeddings of n-grams, and {reason}.")
    for idx, layer in enumerate(arch.layers):
        block = arch.block_of(layer)
        if arch.norms_rotated and layer.leading_dim:
            raise UnsupportedArch(
                f"layer {idx}: norms of q and k follow the rotation, and the dimensions that rotate lead "
                "its heads; those norms are for the halves of whole heads."
            )
        if layer.norm_gate_rank and (reason := _why_no_norm_gates(arch, layer)):
            raise UnsupportedArch(f"layer {idx}: its norms have gates, and {reason}.")
        if layer.attends and (layer.latent is not None) != arch.has_latents:
            raise UnsupportedArch(f"layer {idx}: some layers have latent attention, and others do not.")
        if arch.activation not in (known := _activations_of(layer)):
            what = "the FFN has" if layer.experts is None else "the experts have"
            raise UnsupportedArch(
                f"layer {idx}: {what} {'a' if layer.gated else 'no'} gate and the activation "
                f"'{arch.activation}'; the decoder computes these with {', '.join(known)}."
            )
        if layer.experts is not None and arch.activation == XIELU:
            raise UnsupportedArch(
                f"layer {idx}: experts with the activation '{XIELU}', which has parameters; the decoder has "
                "them for the one FFN of a layer, not for each expert."
            )
        if arch.activation == "swiglu_clamped" and (layer.ffn_cap or layer.expert_cap):
            raise UnsupportedArch(
                f"layer {idx}: activations have a cap, and are 'swiglu_clamped', whose range is its own."
            )
        is_capped = layer.ffn_cap is not None if layer.experts is None else layer.expert_cap is not None
        caps_first = layer.caps_first if layer.experts is None else layer.experts.caps_first
        if caps_first and (arch.activation != "silu" or not layer.gated or not is_capped):
            what = "of the FFN" if layer.experts is None else "of experts"
            raise UnsupportedArch(
                f"layer {idx}: gates {what} are capped before the activation '{arch.activation}'; the "
                "decoder computes that with a cap, gates and 'silu'."
            )
        if layer.only_half is not None and block != "pre":
            raise UnsupportedArch(
                f"layer {idx}: a layer with one half in a '{block}' block; the decoder computes it in a "
                "'pre' block."
            )
        if arch.unit_norms and (layer.only_half is not None or layer.recurrence is not None):
            raise UnsupportedArch(
                f"layer {idx}: a recurrence or one half only, after norms without weights; the decoder "
                "computes these norms in layers with attention and an FFN."
            )
        if layer.recurrence is not None and (block not in _OF_RECURRENCES or arch.norm != "rms"):
            raise UnsupportedArch(
                f"layer {idx}: a recurrence in a '{block}' block with norm '{arch.norm}'; the "
                f"decoder computes it in a block {' or '.join(map(repr, _OF_RECURRENCES))} with norm 'rms'."
            )
        if layer.head_gate is not None and arch.block == "parallel":
            raise UnsupportedArch(
                f"layer {idx}: a gate of the heads in a 'parallel' block; the runtime computes it in others."
            )
        if arch.v_norm and layer.narrow_value_dim is not None:
            raise UnsupportedArch(
                f"layer {idx}: values are normed and narrower than keys; the runtime norms those as wide."
            )
        if reason := why_layer_unfit(layer) or _why_source_unfit(arch, idx) or _why_no_entries(arch, layer):
            raise UnsupportedArch(f"layer {idx}: {reason}")
        if layer.bare_input and (reason := _why_no_bare_input(arch)):
            raise UnsupportedArch(f"layer {idx}: it reads the residual as it is, and {reason}.")
        has_terms = layer.relative is not None or layer.alibi is not None
        if layer.relative is not None and layer.alibi is not None:
            raise UnsupportedArch(
                f"layer {idx}: scores have relative logits and ALiBi; no kernel computes both."
            )
        if has_terms and (arch.attn_softcap or arch.has_sinks(layer)):
            raise UnsupportedArch(
                f"layer {idx}: scores have terms of the distance of keys, and a cap or sinks, too; no kernel "
                "computes both."
            )
        if arch.qkv_clip is not None and not _has_plain_qkv(layer):
            raise UnsupportedArch(
                f"layer {idx}: outputs of the linears of q, k and v are clipped, and it has other linears "
                "than these in attention; the runtime clips these alone."
            )
        if layer.residual_convs is not None and (reason := _why_no_convs(arch)):
            raise UnsupportedArch(f"layer {idx}: convolutions are added to what it computes, and {reason}.")
        if layer.scaled_ffn and (arch.block != "pre" or arch.hyper is not None or arch.layer_scalar):
            raise UnsupportedArch(
                f"layer {idx}: the output of its FFN has a factor, in a '{block}' block, with several "
                "streams or with a factor of the layer; the runtime has it in a 'pre' block without these."
            )
        if layer.experts is not None and layer.experts.delayed and not isinstance(arch.hyper, Shortcuts):
            raise UnsupportedArch(
                f"layer {idx}: experts are delayed, and the residual has no stream for them."
            )
        if layer.norms_experts and (reason := _why_no_post_norm(arch)):
            raise UnsupportedArch(f"layer {idx}: the output of its experts is normed, and {reason}.")
        if layer.experts is not None and layer.experts.branch_norms and block != "sandwich":
            raise UnsupportedArch(
                f"layer {idx}: the branches of a mixture are normed apart in a '{block}' block; the "
                "decoder computes them in a 'sandwich' block."
            )


def _has_plain_qkv(layer: LayerShape) -> bool:
    """Return whether the first linears of a layer are those of q, k and v."""
    return layer.attends and layer.attention_groups[0].linears == ("attn.q", "attn.k", "attn.v")


def _why_no_convs(arch: "Arch") -> str | None:
    """Return why the runtime does not add convolutions to the outputs of halves, None where it does."""
    if arch.block != "pre" or arch.hyper is not None or arch.qkv_bias:
        return (
            f"the block is '{arch.block}', the residual several streams, or keys have a bias; the decoder "
            "computes them in a 'pre' block with one stream, without that bias"
        )
    if arch.residual_scale != 1 or arch.layer_scalar or arch.layer_embed_size or arch.norm != "rms":
        return (
            "outputs have a factor, tokens have embeddings for each layer, or norms subtract the mean; the "
            "runtime computes none of these with them"
        )
    return None


def _why_no_entries(arch: "Arch", layer: LayerShape) -> str | None:
    """Return why the decoder, or the runtime, does not compute a layer's compressed attention, or its table
    of experts, None where both do."""
    if layer.experts is not None and layer.experts.table_size not in (0, arch.vocab_size):
        return f"a table has the experts of {layer.experts.table_size} tokens of {arch.vocab_size}."
    if layer.experts is not None and layer.experts.table_size and arch.layer_embed_size:
        return "a table chooses the experts of tokens, which have embeddings for each layer, too."
    if any(each.compressed is not None for each in arch.layers) and layer.compressed is None:
        return "some layers have compressed attention, and others do not."
    if layer.compressed is None:
        return None
    of_scores = arch.attn_scale or arch.attn_softcap or arch.query_growth or arch.learned_growth
    of_norms = arch.qk_norm or arch.unit_qk_norm or arch.v_norm or arch.norm != "rms" or arch.block != "pre"
    if of_scores or of_norms or not arch.attn_sinks or arch.windowed_sinks:
        return (
            "compressed attention has sinks in each layer, and no factors, caps or other norms; this model "
            "has other facts of attention."
        )
    return None


def _why_no_bare_input(arch: "Arch") -> str | None:
    """Return what a model has with which no layer reads the residual as it is, None where one may."""
    if arch.block != "pre" or arch.unit_norms or arch.altup_streams or arch.laurel_rank:
        return "its norms have no weights or are in other places than before half-layers"
    if arch.hyper is not None and not isinstance(arch.hyper, NormedSums):
        return "the residual is several streams"
    return None


def _why_no_post_norm(arch: "Arch") -> str | None:
    """Return why the runtime does not norm the outputs of experts alone, None where it does."""
    if arch.block != "pre":
        return f"the block is '{arch.block}'; the decoder computes that norm in a 'pre' block"
    if arch.residual_scale != 1:
        return f"the residual scale is {arch.residual_scale:g}; the runtime computes that norm where it is 1"
    if arch.unit_norms or arch.norm_bias:
        return "norms have no weights, or a bias; the decoder computes that norm with a weight alone"
    return None


def _why_no_norm_gates(arch: "Arch", layer: LayerShape) -> str | None:
    """Return why the runtime does not compute gated norms, None where it does."""
    if arch.block_of(layer) != "pre" or arch.norm != "rms" or arch.unit_norms:
        return f"the block is '{arch.block}' or the norm no 'rms' with weights; gates are those of such norms"
    if arch.num_streams > 1:
        return "the residual is several streams; one kernel norms their mixture, without gates"
    if any(layer.norms_experts for layer in arch.layers):
        return "the outputs of experts are normed; one kernel computes that norm and the next, without gates"
    return None


def _activations_of(layer: LayerShape) -> tuple[str, ...]:
    """Return the activations that the decoder computes in the FFN, or the experts, of a layer."""
    if layer.gated:
        squares = ("relu2",) if layer.sub_norms else ()  # kernels that apply a gate do not have it
        return tuple(each for each in ACTIVATIONS if each not in UNGATED or each in squares)
    if layer.experts is not None:  # no kernel of experts has relu
        return tuple(each for each in UNGATED if each != "relu")
    return (*GATED_OR_NOT, *UNGATED)


def _may_have_factor(arch: "Arch", linear: str) -> bool:
    """Return whether the decoder and the runtime multiply the outputs of a linear."""
    if linear.startswith("ffn.") and arch.has_experts:  # a shared expert would be multiplied, too
        return False
    return linear in FACTORED and any(linear in layer.linears for layer in arch.layers)


def _why_source_unfit(arch: "Arch", layer_idx: int) -> str | None:
    """Return why a layer cannot read the keys and values that it is to read, None where it can."""
    layer = arch.layers[layer_idx]
    if layer.kv_source is None:
        return None
    source = arch.layers[layer.kv_source] if layer.kv_source < layer_idx else None
    if source is None or source.kv_source is not None or not source.cached_numbers:
        return f"it reads the keys and values of layer {layer.kv_source}, which has none before it."
    if source.joint:
        return f"it reads the keys and values of layer {layer.kv_source}, which has a recurrence, too."
    heads = [
        (each.num_kv_heads, each.head_dim, each.value_dim, each.rope, each.window) for each in (layer, source)
    ]
    latents = [
        each.latent and (each.latent.kv_rank, each.latent.rope_dim, each.latent.interleaved)
        for each in (layer, source)
    ]
    if latents[0] != latents[1]:
        return f"it reads the latents of layer {layer.kv_source}, which are of another width or order."
    if heads[0] != heads[1]:
        return f"it reads keys and values of layer {layer.kv_source}, whose heads, rope or window differ."
    return None
