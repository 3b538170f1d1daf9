"""The places in a decoder layer where a scale of channels can be moved into what produces an input."""

from typing import TYPE_CHECKING

from compress.models.delta_net import DeltaNet
from compress.models.latent import KV_LATENT, Q_LATENT
from compress.models.lightning import LIGHTNING_NORM, Lightning
from compress.models.linear_groups import LinearGroup
from compress.models.mamba2 import NORM as NORM_OF_OUTPUTS
from compress.models.mamba2 import Mamba2
from compress.models.normed_sum import NormedSums
from compress.models.short_conv import ShortConv
from compress.models.smoothing_pair import SmoothingPair

if TYPE_CHECKING:
    from compress.models.decoder import DecoderLayer


def smoothing_pairs_of(layer: "DecoderLayer") -> list[SmoothingPair]:
    """Return the places where a per-channel scale can be moved into the producer without changing the
    function, in execution order."""
    of_mixer = []
    if layer.shape.has_mixer:
        before_o = _latent_pairs(layer) if layer.shape.has_latent_norms else _value_pairs(layer)
        of_mixer = [*_norm_pairs(layer), *before_o]
    if not layer.shape.has_ffn:
        return of_mixer
    return [*of_mixer, *(_ffn_pairs(layer) if layer.shape.experts is None else _expert_pairs(layer))]


def _scales_inputs(layer: "DecoderLayer") -> bool:
    """Return whether norms precede the halves, have weights, and are not added to the residual."""
    is_residual = isinstance(layer.arch.hyper, NormedSums)
    return layer.has_pre and not layer.arch.unit_norms and not is_residual


def _ffn_pairs(layer: "DecoderLayer") -> list[SmoothingPair]:
    """Return the pairs of an FFN: its norm with its first linears, where the norm precedes them and
    nothing else reads it, and up with down, where a gate has the activation and up is not clamped, or the
    norm between them with down."""
    gate_up, down = layer.shape.groups[-2:]
    pairs = []
    if _scales_inputs(layer) and not layer.arch.shares_norm:
        offset = layer.arch.norm_offset
        pairs.append(SmoothingPair("ffn_norm", gate_up.tap, gate_up.linears, offset=offset))
    if layer.shape.sub_norms:
        offset = layer.arch.norm_offset
        return [*pairs, SmoothingPair("ffn.sub_norm", down.tap, down.linears, offset=offset)]
    clamps = layer.arch.activation == "swiglu_clamped" or layer.shape.ffn_cap is not None
    if layer.shape.gated and not clamps:
        pairs.append(SmoothingPair("ffn.up", down.tap, down.linears))
    return pairs


def _norm_pairs(layer: "DecoderLayer") -> list[SmoothingPair]:
    """Return the pair of the norm before attention and its first linears. There is none where something
    else reads the norm: the other half-layer, the decay and the beta of a delta net, the gate of the
    heads, relative logits, an indexer, a compressor, LAuReL, or gates of the norm; nor where
    attention reads the residual as it is."""
    is_shared = isinstance(layer.shape.recurrence, DeltaNet) or layer.shape.head_gate is not None
    is_shared = is_shared or layer.shape.relative is not None or layer.shape.bare_input
    is_shared = is_shared or layer.shape.indexer is not None or layer.arch.laurel_rank > 0
    is_shared = is_shared or "attn_norm" in layer.shape.gated_norms or layer.shape.has_entries
    if is_shared or not _scales_inputs(layer) or layer.arch.shares_norm:
        return []
    qkv = layer.shape.groups[0]
    return [SmoothingPair("attn_norm", qkv.tap, qkv.linears, offset=layer.arch.norm_offset)]


def _latent_pairs(layer: "DecoderLayer") -> list[SmoothingPair]:
    """Return the pairs of latents: the norm of each and its linear. There is none for a latent that an
    indexer or another layer reads, too, or that is read as it is, too, and none of the values with o,
    because those of all heads are some rows of one linear."""
    is_shared = layer.shape.kv_source is not None or layer.layer_idx in layer.arch.kv_sources
    is_gated = layer.shape.latent is not None and layer.shape.latent.gated
    shared = {KV_LATENT: is_shared, Q_LATENT: layer.shape.indexer is not None or is_gated}
    return [
        SmoothingPair(f"attn.{group.tap}_norm", group.tap, group.linears)
        for group in layer.shape.attention_groups[1:-1]
        if not shared.get(group.tap, True)
    ]


def _value_pairs(layer: "DecoderLayer") -> list[SmoothingPair]:
    """Return the pair of v and o, or of a norm between them and o, of a Mamba-2 mixer and of lightning
    attention that of the norm of their outputs and o, and of a short convolution that of the factors of its
    outputs and o. There is none where the values are normed, which would undo a part of the scale, or are the
    keys, too, which would be scaled with them, or are those of another layer, too, or where they are clipped
    or what heads return is normed, or are remembered by a delta net, whose heads share the weights of their
    norm, or by a mixer without a norm."""
    _, o, *_ = layer.shape.attention_groups
    pairs = _recurrent_pairs(layer, layer.shape.attention_groups[-1])
    if not layer.shape.attends:
        return pairs
    if layer.shape.sub_norms:
        return [SmoothingPair("attn.sub_norm", o.tap, o.linears, offset=layer.arch.norm_offset)]
    is_shared = layer.shape.kv_source is not None or layer.layer_idx in layer.arch.kv_sources
    is_bound = layer.arch.v_norm or layer.shape.out_norm or layer.arch.qkv_clip is not None
    if layer.shape.keys_are_values or is_shared or is_bound:
        return pairs
    repeat = layer.shape.num_heads // layer.shape.num_kv_heads
    return [
        SmoothingPair("attn.v", o.tap, o.linears, head_dim=layer.shape.value_dim, repeat=repeat),
        *pairs,
    ]


def _recurrent_pairs(layer: "DecoderLayer", o: LinearGroup) -> list[SmoothingPair]:
    """Return the pairs of the last linear of a recurrence."""
    if isinstance(layer.shape.recurrence, ShortConv):
        return [SmoothingPair("conv.C", o.tap, o.linears)]
    if isinstance(layer.shape.recurrence, Lightning):
        return [SmoothingPair(LIGHTNING_NORM, o.tap, o.linears)]
    if isinstance(layer.shape.recurrence, Mamba2) and layer.shape.recurrence.normed:
        return [SmoothingPair(NORM_OF_OUTPUTS.removesuffix(".weight"), o.tap, o.linears)]
    return []


def _expert_pairs(layer: "DecoderLayer") -> list[SmoothingPair]:
    """Return the pairs of a mixture of experts. The norm before it is in none, because the router reads
    it, too, and its columns would change; nor is an `up` that is clamped or has no gate, nor the linear
    that computes latents, whose rows would have one scale for all experts."""
    if layer.arch.activation == "swiglu_clamped" or not layer.shape.gated:
        return []
    downs = [
        group
        for group in layer.shape.groups
        if group.name.endswith(".down") and layer.shape.cap_of(group.linears[0]) is None
    ]
    return [
        SmoothingPair(f"{down.linears[0].removesuffix('.down')}.up", down.tap, down.linears) for down in downs
    ]
