"""Random experts of a layer, quantized by any scheme, with what the rounding of their inputs needs."""

from dataclasses import replace

import torch
from torch import Tensor

from compress.kernels.operands.routing import ExpertWeights
from compress.kernels.operands.rows import LARGEST
from compress.quant.numerics import grouped, min_max_scale, round_to_nearest
from compress.quant.scheme import SCHEMES, QuantizedWeight


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_weight(
    shape: tuple[int, int], name: str | None, dtype: torch.dtype, seed: int, *, largest: float = 3.0
) -> Tensor | QuantizedWeight:
    """A weight that keeps the size of its inputs, of which about `largest` are the largest."""
    w_OI = (randn(*shape, seed=seed) * shape[1] ** -0.5).to(dtype)
    if name is None:
        return w_OI
    scheme = SCHEMES[name]
    scale_dtype = dtype if scheme.type == "int" else torch.float32
    weight = round_to_nearest(w_OI, scheme, *min_max_scale(grouped(w_OI, scheme), scheme, scale_dtype))
    if scheme.has_input_global_scale:
        return replace(weight, input_global_scale=torch.tensor(64.0 * (1 + seed % 3)))
    if not scheme.has_static_inputs:
        return weight
    assert scheme.input_dtype is not None
    zero = None if scheme.input_symmetric else torch.tensor(seed % 5 - 2, dtype=torch.int8)
    scale = torch.tensor((largest + seed % 3) / LARGEST[scheme.input_dtype])
    return replace(weight, input_scale=scale, input_zero_point=zero)


def random_experts(
    name: str | None,
    dtype: torch.dtype,
    *,
    hidden: int,
    ffn: int,
    count: int,
    bias: bool = False,
    gated: bool = True,
) -> list[ExpertWeights]:
    """Experts of a layer, which differ in their static scales where they have such."""
    return [
        ExpertWeights(
            random_weight((ffn, hidden), name, dtype, 10 * idx) if gated else None,
            random_weight((ffn, hidden), name, dtype, 10 * idx + 1),
            random_weight((hidden, ffn), name, dtype, 10 * idx + 2, largest=20),
            *([randn(size, seed=10 * idx + size).to(dtype) for size in (ffn, ffn, hidden)] if bias else []),
        )
        for idx in range(count)
    ]
