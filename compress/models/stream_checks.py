"""Checks of residuals that are no plain sum of one stream: that the decoder and the runtime compute them."""

from typing import TYPE_CHECKING

from compress.models.gated_residual import GatedResiduals
from compress.models.gated_sum import GatedSums
from compress.models.hyper_connection import HyperConnections
from compress.models.ngrams import MAX_TOKENS
from compress.models.normed_sum import NormedSums
from compress.models.shortcut import Shortcuts

if TYPE_CHECKING:
    from compress.models.arch import Arch


def why_no_streams(arch: "Arch") -> str | None:
    """Return why the decoder, or the runtime, does not compute a residual that is no plain sum
    (hyper-connections, gated residuals, gated sums, sums with the normed residual or shortcuts), None where
    both do."""
    if arch.block != "pre" or arch.recurrent_block not in (None, "pre"):
        return f"the block is '{arch.block}'; half-layers read their mixtures in a 'pre' block"
    if arch.unit_norms or (arch.norm != "rms" and not isinstance(arch.hyper, NormedSums)):
        return "norms subtract the mean or have no weights; the decoder norms mixtures by 'rms' with a weight"
    if arch.residual_scale != 1 or arch.layer_scalar:
        return "outputs of half-layers or of layers have a factor; those of hyper-connections have their own"
    if isinstance(arch.hyper, Shortcuts) and (reason := _why_no_shortcuts(arch)):
        return reason
    if isinstance(arch.hyper, GatedSums) and any(each.only_half or each.recurrence for each in arch.layers):
        return (
            "some layers have one half or a recurrence; the decoder computes these sums after attention and "
            "an FFN"
        )
    if isinstance(arch.hyper, NormedSums) and any(each.only_half or each.joint for each in arch.layers):
        return "some layers have one half, or a recurrence with attention; the decoder computes others"
    if isinstance(arch.hyper, NormedSums) and _has_factors(arch, arch.hyper):
        return (
            "attention of a layer reads what is not normed; the decoder adds its output without factors then"
        )
    of_head = arch.logit_scale != 1 or arch.norm_bias or arch.plain_final_norm
    if isinstance(arch.hyper, GatedResiduals) and of_head:
        return "logits have a factor, or norms a bias or an offset of their own; gated residuals have none"
    if isinstance(arch.hyper, HyperConnections) and arch.hyper.sinkhorn_iterations and arch.hyper.eps <= 0:
        return "their mixing has an eps of 0; sums of columns that are 0 are divided by"
    if any(layer.norms_experts for layer in arch.layers):
        return "the outputs of experts are normed; the decoder spreads them as they are"
    return None


def _has_factors(arch: "Arch", facts: NormedSums) -> bool:
    """Return whether sums have factors in a layer that does not norm the residual."""
    return any(each.bare_input for each in arch.layers) and facts.factors("mixer", recurs=False) != (1.0, 1.0)


def _why_no_shortcuts(arch: "Arch") -> str | None:
    """Return why the decoder does not compute shortcut-connected mixtures, None where it does."""
    if any(layer.only_half or layer.recurrence for layer in arch.layers):
        return (
            "some layers have one half or a recurrence; the decoder adds experts after attention and an FFN"
        )
    for idx, layer in enumerate(arch.layers):
        is_last = idx + 1 == arch.num_layers
        if layer.experts is None:
            continue
        if not layer.experts.delayed:
            return (
                f"layer {idx} has experts whose output is added at once; with shortcuts it is added after "
                "the next layer"
            )
        if is_last or arch.layers[idx + 1].experts is not None:
            return f"the output of the experts of layer {idx} waits for no FFN of a layer after it"
    return None


def why_no_ngrams(arch: "Arch") -> str | None:
    """Return why the decoder, or the runtime, does not compute embeddings of n-grams, None where both do."""
    if not isinstance(arch.hyper, GatedResiduals):
        return "the residual has no gates; the decoder adds them to the streams of gated residuals"
    if any(layer.ngrams and layer.ngrams.num_streams != arch.num_streams for layer in arch.layers):
        return f"they have streams other than the {arch.num_streams} of the residual"
    if arch.layer_embed_size or arch.position_offset is not None:
        return "tokens have embeddings for each layer, or positions learned ones; no decoder here reads both"
    if arch.vocab_size >= MAX_TOKENS:
        return f"the vocabulary has {arch.vocab_size} tokens; the runtime keeps ids below {MAX_TOKENS}"
    return None


def why_no_altup(arch: "Arch") -> str | None:
    """Return why the decoder, or the runtime, does not compute AltUp or LAuReL, None where both do."""
    if arch.block != "sandwich" or arch.norm != "rms" or arch.hyper is not None:
        return (
            f"the block is '{arch.block}', the norm '{arch.norm}', or it has hyper-connections; the decoder "
            "computes them in a 'sandwich' block with norm 'rms'"
        )
    if arch.residual_scale != 1 or arch.layer_scalar or arch.norm_offset:
        return "outputs of half-layers or of layers have a factor, or norms an offset; the runtime has none"
    others = [each for layer in arch.layers for each in (layer.recurrence, layer.experts, layer.only_half)]
    if any(each is not None for each in others):
        return "a layer has a recurrence, experts or one half; the decoder has attention and an FFN in each"
    return None
