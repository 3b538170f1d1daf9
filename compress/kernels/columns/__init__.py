"""Columns of a block, one after the other: the inner loops of GPTQ and of coordinate descent.

    round      w_i -= sum_{j < i} U_ji e_j;   c_i = nearest(w_i);   e_i = (w_i - value(c_i)) / U_ii
    refit      s' = stored(s - (g . l) / (l . H l));   g += (H l) (s' - s)
    descend    g_i += sum_{j < i} H_ji m_j;   l'_i = nearest(l_i s' - g_i pull_i);   m_i = (l'_i - l_i) s'

`methods/quantize/gptq.py` and `methods/quantize/descent.py` say what they mean. A column waits for those before it, and
outputs do not know one another, so
what a column costs beside its few operations decides: on a GPU a block is one launch (`fused.py`), on a CPU integers go through numpy
(`host.py`), and `reference.py` says it in torch, for all that is left. They sum in different orders, so last bits differ.

Shapes: B columns of a block, O outputs. Everything is float32, and contiguous but for H and U, which may have any strides.
"""

import torch
from torch import Tensor

from compress.kernels.columns import fused, host, reference
from compress.kernels.columns.reference import best_scale
from compress.kernels.compilers.triton import triton
from compress.quant.scheme import Scheme

__all__ = ["best_scale", "descend_block", "round_block"]


def round_block(
    w_BO: Tensor, factor_BB: Tensor, scheme: Scheme, scale_BO: Tensor, zero_BO: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes and errors e [B, O]; U is upper triangular."""
    if w_BO.is_cuda and triton is not None:
        return fused.launch_round(w_BO, factor_BB, scheme, scale_BO, zero_BO)
    if w_BO.is_cpu and scheme.type == "int":
        return host.round_block(w_BO, factor_BB, scheme, scale_BO, zero_BO)
    return reference.round_block(w_BO, factor_BB, scheme, scale_BO, zero_BO)


def descend_block(
    levels_BO: Tensor,
    g_BO: Tensor,
    h_BB: Tensor,
    pull_B: Tensor,
    scheme: Scheme,
    scale_O: Tensor,
    zero_O: Tensor | None,
    *,
    slope_BO: Tensor | None = None,
    scale_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """New levels, which are codes less their zero points [B, O], new scales [O], and what they move the values by [B, O]; H is symmetric.

    `slope_BO` is H l, of a block that is a whole group: its scales, stored in `scale_dtype`, become the best for its old codes first.
    """
    state = levels_BO, g_BO, h_BB, pull_B, scheme, scale_O, zero_O
    if levels_BO.is_cuda and triton is not None:
        return fused.launch_descend(*state, slope_BO=slope_BO, scale_dtype=scale_dtype)
    descend = host.descend if levels_BO.is_cpu and scheme.type == "int" else reference.descend
    return reference.descend_block(*state, slope_BO=slope_BO, scale_dtype=scale_dtype, descend=descend)
