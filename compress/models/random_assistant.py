"""Assistants of random weights, for benchmarks and tests in which only shapes matter."""

from dataclasses import replace

import torch
from torch import Tensor

from compress.models.arch import PLAIN_FACTS, Arch
from compress.models.assistant import (
    Assistant,
    AssistantFacts,
    OrderedEmbeddings,
    arch_of_assistant,
    check_clusters,
    clusters,
    has_plain_keys,
    parameter_shapes,
)
from compress.models.random_source import random_weight
from compress.quant.scheme import QuantizedWeight


def random_assistant(
    target: Arch,
    *,
    device: torch.device,
    dtype: torch.dtype,
    hidden_size: int = 32,
    layers_of_each_type: int = 1,
    ordered: OrderedEmbeddings | None = None,
    seed: int = 0,
) -> Assistant:
    """Return an assistant for a model: layers like its last ones of each type that have keys and values, with
    an FFN twice as wide as the hidden size.

    Raises:
        UsageError: the vocabulary is not clusters of equal size.
    """
    last = {layer.window is not None: layer for layer in target.layers if has_plain_keys(layer)}
    layers = [
        replace(layer, intermediate_size=2 * hidden_size, keys_are_values=False, experts=None)
        for _, layer in sorted(last.items(), reverse=True)
    ]
    plain = target.replace(
        hidden_size=hidden_size,
        layers=tuple(each for each in layers for _ in range(layers_of_each_type)),
        tied_head=False,
        config={},
        **PLAIN_FACTS,
    )
    arch, num_read = arch_of_assistant(plain.replace(activation="silu", family="llama"))
    facts = AssistantFacts(arch, num_read, target.hidden_size, ordered)
    if ordered is not None:
        check_clusters(ordered, arch.vocab_size)
    generator = torch.Generator(device).manual_seed(seed)
    weights: dict[str, Tensor | QuantizedWeight] = {}
    for name, shape in parameter_shapes(facts).items():
        if len(shape) == 2:
            weights[name] = random_weight((shape[0], shape[1]), None, dtype=dtype, generator=generator)
        else:
            weights[name] = torch.full(shape, 1.0 - arch.norm_offset, dtype=dtype, device=device)
    if ordered is None:
        return Assistant(facts, weights)
    order = torch.randperm(arch.vocab_size, generator=torch.Generator().manual_seed(seed))
    return Assistant(facts, weights, clusters(order, ordered))
