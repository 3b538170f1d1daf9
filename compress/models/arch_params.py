"""Numbers of parameters of a model, from its facts."""

import math
from typing import TYPE_CHECKING

import torch

from compress.models.gated_residual import GatedResiduals
from compress.models.layer_shape import XIELU
from compress.models.xielu import PARAMETERS

if TYPE_CHECKING:
    from compress.models.arch import Arch


def num_params_of(arch: "Arch") -> int:
    """Return the number of all parameters; a tied head counts once. Biases and norms included."""
    norm_size = (1 + arch.norm_bias) * arch.hidden_size
    norm_size = 0 if arch.unit_norms or not arch.norms_stream else norm_size
    total = arch.num_outer_params + norm_size + arch.num_linear_params
    total += dense_layer_params(arch) + arch.head_bias * arch.vocab_size
    total += arch.embed_norm_weight * (1 + arch.norm_bias) * arch.hidden_size
    total += stream_params(arch)
    for layer in arch.layers:
        total += arch.num_norms(layer) * norm_size
        if arch.qk_norm and layer.attends:
            sizes = arch.qk_norm_sizes(layer)[: 1 if layer.kv_source is not None else 2]
            total += (1 + arch.qk_norm_bias) * sum(sizes)
        total += sum(layer.latent_norm_sizes.values())
        total += sum(map(math.prod, layer.dense_shapes(arch.hidden_size).values()))
        if arch.has_sinks(layer):
            total += layer.num_heads
        if arch.learned_growth and layer.attends:
            total += 2 * layer.num_heads
        if layer.sub_norms:
            total += layer.num_heads * layer.head_dim + layer.intermediate_size
        total += arch.layer_scalar
        if arch.activation == XIELU and layer.has_ffn:
            total += len(PARAMETERS)
        for name in layer.linears:
            total += layer.linear_shape(name, arch.hidden_size)[0] if arch.has_bias(name, layer) else 0
    return total


def num_position_rows_of(arch: "Arch") -> int:
    """Return the rows of the learned table of positions, with those before the first position; 0 without
    one."""
    if arch.position_offset is None or arch.sinusoidal_positions:
        return 0
    return arch.max_position + arch.position_offset


def num_outer_params_of(arch: "Arch") -> int:
    """Return the number of parameters outside of the layers that are tables or matrices: embeddings, learned
    positions, a head that is not one of them, the projection of the embeddings for each layer, and those of
    the streams of AltUp."""
    own = (1 if arch.tied_head else 2) * arch.vocab_size * arch.hidden_size
    own += arch.num_position_rows * arch.hidden_size
    own += 2 * max(arch.altup_streams - 1, 0) * arch.hidden_size**2
    return own + (arch.layer_embed_rows + arch.hidden_size) * arch.num_layers * arch.layer_embed_size


def num_linear_params_of(arch: "Arch") -> int:
    """Return the number of weights of all decoder linears."""
    return sum(
        math.prod(layer.linear_shape(name, arch.hidden_size))
        for layer in arch.layers
        for name in layer.linears
    )


def num_active_linear_params_of(arch: "Arch") -> int:
    """Return the number of weights of the decoder linears that one token goes through, and of those around
    experts on latents."""
    active = 0.0
    for layer in arch.layers:
        active += layer.around_experts(arch.hidden_size)
        for name in layer.linears:
            active += math.prod(layer.linear_shape(name, arch.hidden_size)) * layer.token_frac(name)
    return round(active)


def num_active_params_of(arch: "Arch") -> int:
    """Return the number of all parameters but those of the experts that a token is not routed to."""
    idle = 0.0
    for layer in arch.layers:
        for name in layer.linears:
            rows, columns = layer.linear_shape(name, arch.hidden_size)
            idle += (1 - layer.token_frac(name)) * rows * (columns + arch.has_bias(name, layer))
    return arch.num_params - round(idle)


def dense_layer_params(arch: "Arch") -> int:
    """Return the number of parameters in layers that no scheme quantizes because of facts of the model: those
    that read embeddings for each layer, with the norm outside of the layers, those of AltUp, and those of
    LAuReL."""
    hidden_size = arch.hidden_size
    of_layer = 0
    if arch.layer_embed_size:
        of_layer += (2 * arch.layer_embed_size + 1) * hidden_size
    if arch.altup_streams:
        n = arch.altup_streams
        of_layer += (n + 2) * hidden_size + n**3 + n**2
    if arch.laurel_rank:
        of_layer += (2 * arch.laurel_rank + 1) * hidden_size
    return arch.layer_embed_size + arch.num_layers * of_layer


def stream_params(arch: "Arch") -> int:
    """Return the number of parameters by which half-layers and the head read several streams of the residual,
    without those of AltUp."""
    if arch.hyper is None:
        return 0
    halves = sum(layer.has_mixer + layer.has_ffn for layer in arch.layers)
    return arch.hyper.num_params(arch.hidden_size, halves)


def itemsize_of(arch: "Arch") -> int:
    """Return the bytes of a number in the dtype of the model, which its dense weights and its scales have on
    disk."""
    itemsize: int = getattr(torch, arch.dtype).itemsize
    return itemsize


def large_dense_params(arch: "Arch") -> int:
    """Return the number of parameters that no scheme quantizes and that are a large part of some models:
    those of `dense_layer_params`, those of gated residuals, and those of embeddings of n-grams."""
    total = dense_layer_params(arch)
    if isinstance(arch.hyper, GatedResiduals):
        total += stream_params(arch)
    tables = (
        layer.ngrams.dense_shapes(arch.hidden_size) for layer in arch.layers if layer.ngrams is not None
    )
    return total + sum(math.prod(shape) for shapes in tables for shape in shapes.values())


def routes_by_token(arch: "Arch") -> bool:
    """Return whether a table chooses the experts of tokens in some layers."""
    return any(layer.experts is not None and layer.experts.table_size > 0 for layer in arch.layers)


def reads_tokens(arch: "Arch") -> bool:
    """Return whether some layers read tokens themselves: a table of their experts, or n-grams."""
    return routes_by_token(arch) or arch.has_ngrams


def is_compressed(arch: "Arch") -> bool:
    """Return whether a model has compressed attention, which all of its layers have then."""
    return any(layer.compressed is not None for layer in arch.layers)
