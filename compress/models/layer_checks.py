"""Checks of the facts of one layer: that they fit one another."""

from compress.models.compressed import Compressed
from compress.models.latent import Latent
from compress.models.layer_shape import LayerShape, Rope


def why_layer_unfit(layer: LayerShape) -> str | None:
    """Return why the facts of the layer do not fit one another, None where they do."""
    if not layer.has_ffn and layer.experts is not None:
        return "it has experts, and no half for them."
    if reason := _why_caps_unfit(layer):
        return reason
    if layer.ngrams is not None and (layer.recurrence is None or layer.joint):
        return "it has embeddings of n-grams, and no recurrence in place of attention."
    if layer.ngrams is not None and (reason := layer.ngrams.why_unfit()):
        return reason
    plain = layer.has_ffn and layer.gated and layer.experts is None and layer.ffn_cap is None
    if layer.gate_sparsity is not None and not plain:
        return "gates of an FFN are sparse, and it has no FFN with a gate, experts in its place, or a cap."
    if layer.scaled_ffn and (not layer.has_ffn or layer.experts is not None):
        return "outputs of an FFN have a factor, and it has no FFN, or experts in its place."
    if layer.residual_convs is not None and (layer.only_half is not None or not _caches_plain_heads(layer)):
        return (
            "convolutions are added to keys, values and both halves, and it has one half, or what it caches "
            "is other than whole keys and values of its own."
        )
    if layer.bare_input and (not layer.has_mixer or layer.recurrence is not None or layer.norm_gate_rank):
        return "it reads the residual as it is, and has a recurrence, gates of norms, or no attention."
    if layer.o_bias and not layer.attends:
        return "the last linear of attention has a bias of its own, and it has no attention."
    if not layer.has_mixer:
        of_attention = (
            *(layer.recurrence, layer.latent, layer.kv_source, layer.block_indexer),
            *(layer.relative, layer.alibi),
        )
        has_own = any(each is not None for each in of_attention)
        return "it has an FFN only, and facts of what is in place of attention." if has_own else None
    if layer.out_norm and (layer.joint or layer.keys_are_values or not _attends_plainly(layer)):
        return (
            "what heads return is normed, and it has a recurrence, latents, keys that are its values, or "
            "values that are narrower."
        )
    if layer.sub_norms and (reason := _why_no_sub_norms(layer)):
        return f"the inputs of its last linears are normed, and it has {reason}."
    if layer.num_heads % layer.num_kv_heads:
        return f"{layer.num_heads} query heads cannot share {layer.num_kv_heads} KV heads evenly."
    if reason := _why_values_unfit(layer) or _why_indexer_unfit(layer):
        return reason
    has_terms = layer.relative is not None or layer.alibi is not None
    if has_terms and (layer.chunk or not _caches_plain_heads(layer)):
        return (
            "scores have terms of the distance of keys, and it has chunks of positions, or what it caches is "
            "other than whole keys and values of its own."
        )
    is_gated = layer.has_output_gate or layer.head_gate is not None
    if is_gated and layer.keys_are_values:
        return "attention has an output gate, and keys that are its values, too."
    kinds = (layer.output_gate, layer.head_gate is not None, layer.latent is not None and layer.latent.gated)
    if sum(kinds) > 1:
        return "attention has two of an output gate of each channel, one of each head and one of latents."
    own = is_gated or layer.recurrence is not None or layer.keys_are_values
    if layer.kv_source is not None and (own or layer.chunk or layer.query_rank):
        return (
            "a layer reads the keys and values, or the latents, of another, and has an output gate, a latent "
            "of queries, a recurrence, a chunk or keys that are its values, too."
        )
    if layer.joint and layer.recurrence is None:
        return "attention and a recurrence are joint, and it has no recurrence."
    if layer.recurrence is not None:
        if layer.joint and not layer.recurrence.may_join:
            kind = layer.recurrence.name
            return f"attention and {kind} are joint; the decoder has one or the other in a layer."
        has_latent = layer.latent is not None or layer.keys_are_values
        if has_latent or is_gated or layer.window is not None or layer.chunk:
            return "a recurrence is in place of attention, and attention has facts of its own."
        if not layer.joint or (reason := layer.recurrence.why_unfit()):
            return layer.recurrence.why_unfit()
    if layer.compressed is not None and (reason := _why_compressed_unfit(layer, layer.compressed)):
        return reason
    if layer.rope is not None and (reason := _why_rope_unfit(layer, layer.rope)):
        return reason
    return None if layer.latent is None else _why_latent_unfit(layer, layer.latent)


def _attends_plainly(layer: LayerShape) -> bool:
    """Return whether a layer has attention whose values are as wide as its keys, without latents."""
    others = (layer.latent, layer.recurrence, layer.compressed, layer.narrow_value_dim)
    return all(each is None for each in others)


def _caches_plain_heads(layer: LayerShape) -> bool:
    """Return whether attention of a layer reads keys and values of its own, as wide as one another, and has
    no recurrence, no indexer and no gate of channels."""
    others = (layer.latent, layer.recurrence, layer.kv_source, layer.narrow_value_dim, layer.block_indexer)
    return all(each is None for each in others) and not (layer.keys_are_values or layer.output_gate)


def _why_no_sub_norms(layer: LayerShape) -> str | None:
    """Return what a layer has that the runtime does not compute with norms before its last linears, None
    where it computes them."""
    if layer.only_half is not None or layer.experts is not None:
        return "one half only, or experts"
    if layer.joint or layer.keys_are_values or not _attends_plainly(layer):
        return "a recurrence, latents, keys that are its values, or values that are narrower"
    if layer.has_output_gate or layer.head_gate is not None or layer.out_norm:
        return "gates or norms of what heads return, too"
    if layer.gate_sparsity is not None or layer.ffn_cap is not None or layer.scaled_ffn:
        return "an FFN with sparse gates, a cap or a factor"
    return "convolutions of both halves" if layer.residual_convs is not None else None


def _why_caps_unfit(layer: LayerShape) -> str | None:
    if layer.caps_first and (layer.ffn_cap is None or layer.experts is not None):
        return "gates of its FFN are capped before silu, and it has no cap, or experts in place of the FFN."
    if layer.ffn_cap is None and layer.expert_cap is None:
        return None
    if not layer.has_ffn or not layer.gated:
        return "activations of an FFN are capped, and it has no FFN, or one without a gate."
    if layer.expert_cap is not None and layer.experts is None:
        return "activations of its experts are capped, and it has none."
    if layer.ffn_cap is not None and layer.experts is not None and not layer.experts.shared_size:
        return "activations of its shared expert are capped, and it has none."
    return None


def _why_values_unfit(layer: LayerShape) -> str | None:
    if layer.narrow_value_dim is None:
        return None
    if layer.narrow_value_dim >= layer.head_dim or layer.narrow_value_dim % 2:
        return (
            f"values of {layer.narrow_value_dim} dimensions and keys of {layer.head_dim}; narrower values "
            "must have an even width below that of the keys."
        )
    others = (layer.latent, layer.recurrence, layer.kv_source)
    if layer.output_gate or layer.keys_are_values or any(each is not None for each in others):
        return (
            "values are narrower than keys, and it has an output gate, latents, a recurrence, keys that "
            "are its values or those of another layer, too."
        )
    return None


def _why_indexer_unfit(layer: LayerShape) -> str | None:
    facts = None if layer.latent is None else layer.latent.indexer
    if facts is not None and layer.latent is not None:
        turning = layer.latent.rope_dim if layer.rope is not None else 0
        if reason := _why_rope_too_wide(turning, facts.head_dim):
            return reason
        if not facts.of_stream and not layer.latent.q_rank:
            return "its indexer reads the latent of queries, which it does not have."
        if layer.window is not None:
            return "its indexer chooses among all earlier keys, and it has a window."
        if facts.pool_size and layer.rope is not None:
            return "its indexer chooses pools of positions, and it has a rope; keys of pools do not rotate."
        if reason := facts.why_unfit():
            return reason
    if layer.block_indexer is None:
        return None
    if (
        layer.recurrence is not None
        or layer.latent is not None
        or layer.kv_source is not None
        or layer.window
    ):
        return (
            "an indexer chooses blocks, and it has a recurrence, latents, a window, or the keys and values "
            "of another layer."
        )
    if not layer.block_indexer.pooled and layer.block_indexer.num_heads != layer.num_kv_heads:
        return (
            f"{layer.block_indexer.num_heads} heads of the indexer choose blocks for "
            f"{layer.num_kv_heads} KV heads; each has one of its own."
        )
    if layer.block_indexer.local_blocks > layer.block_indexer.top_blocks:
        return (
            f"the last {layer.block_indexer.local_blocks} blocks are always among the "
            f"{layer.block_indexer.top_blocks} that its indexer chooses, and these are fewer."
        )
    if layer.rope is not None and layer.rope.kind in ("proportional", "longrope"):
        return f"its indexer turns the first dimensions of a head, and its rope is '{layer.rope.kind}'."
    return _why_rope_too_wide(layer.turning_dim, layer.block_indexer.head_dim)


def _why_rope_too_wide(turning_dim: int, index_dim: int) -> str | None:
    """Return why heads of an indexer cannot turn as those of attention do, None where they can."""
    if turning_dim <= index_dim:
        return None
    return (
        f"its rope turns {turning_dim} dimensions of a head, and heads of its indexer have {index_dim}; they "
        "have to be as many or more."
    )


def _why_compressed_unfit(layer: LayerShape, compressed: Compressed) -> str | None:
    others = (layer.latent, layer.recurrence, layer.block_indexer, layer.kv_source, layer.narrow_value_dim)
    plain = not (layer.output_gate or layer.head_gate or layer.chunk or layer.keys_are_values)
    if any(each is not None for each in others) or not plain:
        return "it has compressed attention, and facts of another."
    if layer.num_kv_heads != 1 or layer.window is None:
        return "compressed attention has one KV head and a window, and it has others."
    if layer.num_heads % compressed.out_groups:
        return f"{layer.num_heads} query heads cannot form {compressed.out_groups} groups of one size."
    if compressed.rope_dim % 2 or compressed.rope_dim > layer.head_dim:
        return (
            f"{compressed.rope_dim} of the {layer.head_dim} dimensions of a head rotate; they must be even."
        )
    if layer.rope is None or layer.rope.rotary_dim != compressed.rope_dim or layer.rope.leading:
        return f"its rope must rotate the last {compressed.rope_dim} dimensions of a head."
    if compressed.overlaps and not compressed.rate:
        return "its entries overlap, and it has none."
    indexer = compressed.indexer
    if indexer is not None and (not compressed.overlaps or indexer.rate != compressed.rate):
        return "its indexer chooses entries of other positions than it has."
    return None if indexer is None else _why_rope_too_wide(compressed.rope_dim, indexer.head_dim)


def _why_rope_unfit(layer: LayerShape, rope: Rope) -> str | None:
    if rope.rotary_dim % 2 or rope.rotary_dim > layer.head_dim:
        return (
            f"its rope rotates {rope.rotary_dim} of the {layer.head_dim} dimensions of a head, and must "
            "rotate an even number of them."
        )
    if rope.exponents and len(rope.exponents) != (rope.rotary_dim or layer.head_dim) // 2:
        return (
            f"its rope has {len(rope.exponents)} exponents of frequencies, and "
            f"{(rope.rotary_dim or layer.head_dim) // 2} frequencies."
        )
    if rope.leading and (not rope.rotary_dim or rope.kind == "proportional" or layer.latent is not None):
        return (
            "the dimensions that rotate lead its heads, which is for heads that rotate in part, without "
            f"latents; its rope is '{rope.kind}' with rotary_dim {rope.rotary_dim}."
        )
    return None


def _why_latent_unfit(layer: LayerShape, latent: Latent) -> str | None:
    if latent.rope_norm and not latent.rope_dim:
        return "the dimensions that its keys share are normed, and there are none."
    if latent.gated and not latent.q_rank:
        return "its latents of queries have gates, and it has no such latents."
    if not latent.rope_dim and layer.rope is not None:
        return "it has a rope, and its latents have no dimension that rotates."
    still_dim = layer.head_dim - latent.rope_dim
    if still_dim < 2 or still_dim % 2 or latent.rope_dim % 2:
        return (
            f"{latent.rope_dim} of the {layer.head_dim} dimensions of a head rotate; both they and the "
            "others have to be even numbers, the others at least 2."
        )
    if layer.rope is not None and layer.rope.rotary_dim != latent.rope_dim:
        return (
            f"its rope rotates {layer.rope.rotary_dim} dimensions of a head, and its latents have "
            f"{latent.rope_dim} that rotate."
        )
    if latent.value_dim > layer.head_dim or latent.value_dim % 2:
        return (
            f"values of {latent.value_dim} dimensions and keys of {layer.head_dim}; values "
            "must have an even width that is not above that of the keys."
        )
    if layer.num_kv_heads != layer.num_heads or layer.keys_are_values:
        return (
            f"{layer.num_heads} query heads and {layer.num_kv_heads} KV heads; with latent attention each "
            "query head has a KV head of its own."
        )
    return None
