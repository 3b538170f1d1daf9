"""A quantized model in training: its layers with some linears replaced by modules that are trained, and
everything outside of the layers from a decoder that is not.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from compress.models.decoder import Decoder
from compress.models.weights import Weights, WeightSource, build_layer, fill_, split_outer
from compress.quant.scheme import QuantizedWeight

MakeLinear = Callable[[QuantizedWeight, Tensor | None], nn.Module | None]
"""(weight, bias) -> the module that is trained in place of that linear; None where it stays as it is."""


def quantized_student(
    outer: Decoder,
    layers: Callable[[int], Weights],
    make_linear: MakeLinear,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    """Return a decoder with the modules of `outer` outside of the layers, and with layers whose quantized
    linears are what `make_linear` returns. Everything else is frozen, in `dtype`."""
    with torch.device("meta"):
        student = Decoder(outer.arch)
    for name, module in _outside_of_layers(outer).items():
        setattr(student, name, module)
    for idx in range(outer.arch.num_layers):
        weights = layers(idx)
        layer = build_layer(outer.arch, idx, weights, dtype=dtype, device=device)
        for name in layer.shape.linears:
            weight = weights[f"{name}.weight"]
            if not isinstance(weight, QuantizedWeight):
                continue
            trained = make_linear(weight, layer.linear(name).bias)
            if trained is not None:
                parent, _, leaf = name.rpartition(".")
                setattr(layer.get_submodule(parent), leaf, trained)
        student.layers[idx] = layer
    return student


def outer_decoder(source: WeightSource, *, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Return a decoder whose modules outside of the layers (embeddings, last norm, head) have the source's
    weights, dequantized; its layers have none."""
    with torch.device("meta"):
        decoder = Decoder(source.arch)
    weights = split_outer(source.outer())[0]
    for module_name, module in _outside_of_layers(decoder).items():
        prefix = f"{module_name}."
        own = {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}
        if own:  # a tied head has none
            fill_(module, own, dtype=dtype, device=device)
    if source.arch.tied_head:
        decoder.head.weight = decoder.embed.weight
    return decoder.requires_grad_(False)


def _outside_of_layers(decoder: Decoder) -> dict[str, nn.Module]:
    return {name: module for name, module in decoder.named_children() if name != "layers"}
