"""MTP heads of random weights, for benchmarks and tests in which only shapes and schemes matter."""

import torch
from torch import Tensor

from compress.models.arch import Arch
from compress.models.mtp import LAYER, MtpFacts, MtpHead, arch_of_head, parameter_shapes
from compress.models.mtp_names import last_attention_layer
from compress.models.random_source import RandomSource, random_weight
from compress.quant.scheme import QuantizedWeight, Scheme


def random_mtp(
    target: Arch, *, device: torch.device, dtype: torch.dtype, scheme: Scheme | None = None, seed: int = 0
) -> MtpHead:
    """Return a head over a model with a dense matrix of logits, with `scheme` for the linears of the head's
    layer (None: dense).

    Raises:
        UsageError: the model can have none.
    """
    arch = arch_of_head(target, last_attention_layer(target))
    layer = RandomSource(arch, device=device, dtype=dtype, scheme=scheme, seed=seed).layer(0)
    weights: dict[str, Tensor | QuantizedWeight] = {f"{LAYER}{name}": each for name, each in layer.items()}
    generator = torch.Generator(device).manual_seed(seed)
    facts = MtpFacts(arch)
    for name, shape in parameter_shapes(facts).items():
        if name.startswith(LAYER):
            continue
        if len(shape) == 2:
            weights[name] = random_weight((shape[0], shape[1]), None, dtype=dtype, generator=generator)
        else:
            weights[name] = torch.full(shape, 1.0 - arch.norm_offset, dtype=dtype, device=device)
    matrix = random_weight((target.vocab_size, target.hidden_size), None, dtype=dtype, generator=generator)
    assert isinstance(matrix, Tensor)
    return MtpHead(facts, weights, lambda: matrix)
