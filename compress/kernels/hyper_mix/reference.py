"""Reference of the beginning of a half-layer with hyper-connections (`models/hyper_connection.py`): the
factors of the streams, their mixture and its norm. Products and functions of single numbers have one shape,
so that a row depends on nothing but the row (`row_product`)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.act_mul.reference import in_whole_vectors
from compress.kernels.linear.row_product import row_product
from compress.kernels.operands.hyper import HyperWeights, packed_factors
from compress.kernels.operands.rows import ActivationQuant, QuantizedRows, RowNorm
from compress.kernels.rms_norm.reference import rms_norm_rows
from compress.kernels.select import Kernel, anything, register
from compress.models.hyper_connection import coefficients, mixed

ROWS = 4


def hyper_mix(
    streams_TE: Tensor, hyper: HyperWeights, norm: RowNorm, quant: ActivationQuant | None = None
) -> tuple[Tensor | QuantizedRows, Tensor | None]:
    """Return the norm [T, D] of the mixture of the streams, quantized if the next linear needs it, and the
    factors of the end of the half-layer, float32 [T, F]; None for the head."""
    x_f32 = streams_TE.to(torch.float32)
    if x_f32.is_cuda:
        x_f32 = F.rms_norm(x_f32, x_f32.shape[-1:], eps=hyper.norm_eps)
        logits_TM = row_product(x_f32, hyper.blocks, rows=ROWS)
    else:
        # The mean of each stream first: one of all numbers of one row is cut where threads share it.
        means_TN = x_f32.unflatten(-1, (hyper.facts.num_streams, -1)).square().mean(-1)
        inverse_T1 = (sum(means_TN.split(1, -1)) / means_TN.shape[-1]).add_(hyper.norm_eps).rsqrt_()
        logits_TM = row_product(x_f32, hyper.blocks, rows=ROWS) * inverse_T1
    factors = coefficients(hyper.facts, logits_TM, hyper.bias_M, hyper.gains, in_whole_vectors)
    x_TD = mixed(streams_TE, factors.pre)
    rows = rms_norm_rows(x_TD, norm.weight, norm.eps, quant)
    return rows, None if factors.post is None else packed_factors(factors)


register(Kernel("hyper_mix", "reference", min_sm=0, priority=0, supports=anything, fn=hyper_mix))
