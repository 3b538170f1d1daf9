"""The inner loops of GPTQ and of coordinate descent: the columns of a block, one after the other.

    round      w_i -= sum_{j < i} U_ji e_j;   c_i = nearest(w_i);   e_i = (w_i - value(c_i)) / U_ii
    refit      s' = stored(s - (g . l) / (l . H l));   g += (H l) (s' - s)
    descend    g_i += sum_{j < i} H_ji m_j;   l'_i = nearest(l_i s' - g_i / H_ii);   m_i = (l'_i - l_i) s'

for every output (row of the weight) at once: w_i is column i of the weight, c_i its codes, l_i its levels
(codes less zero points), s the scales, g half the gradient of the loss and m the changes of the values.
`methods/quantize/gptq.py` and `methods/quantize/descent.py` derive the equations.

A column needs the results of all columns before it, and outputs are independent. A column has few operations,
so their fixed cost decides: on a GPU a block is one launch (`fused.py`), on a CPU integer codes are rounded
in numpy (`host.py`), and `reference.py` has the loops in torch for everything else. The three sum in
different orders, so last bits differ.

Memory layout: [B, O], columns as rows; float32, contiguous except for H and U, which may have any strides.
Shapes: B columns of a block, O outputs.
"""

import torch
from torch import Tensor

from compress.kernels.columns import fused, host, reference
from compress.kernels.columns.block import DescentBlock
from compress.kernels.columns.reference import best_scale
from compress.kernels.compilers.triton import triton
from compress.quant.scheme import Scheme

__all__ = ["DescentBlock", "best_scale", "descend_block", "round_block"]


def round_block(
    w_BO: Tensor, factor_BB: Tensor, scheme: Scheme, scale_BO: Tensor, zero_BO: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return codes and errors e, both [B, O]; `factor_BB` is U, upper triangular."""
    if w_BO.is_cuda and triton is not None:
        return fused.launch_round(w_BO, factor_BB, scheme, scale_BO, zero_BO)
    if w_BO.is_cpu and scheme.type == "int":
        return host.round_block(w_BO, factor_BB, scheme, scale_BO, zero_BO)
    return reference.round_block(w_BO, factor_BB, scheme, scale_BO, zero_BO)


def descend_block(
    block: DescentBlock,
    *,
    curvature_product_BO: Tensor | None = None,
    scale_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return new levels [B, O], new scales [O], and the changes of the dequantized values [B, O].

    Scales change only if `curvature_product_BO` = H l is given, for a block that is a whole scale group: each
    first takes the value, storable in `scale_dtype`, that is best for the old codes.
    """
    if block.levels_BO.is_cuda and triton is not None:
        return fused.launch_descend(block, curvature_product_BO=curvature_product_BO, scale_dtype=scale_dtype)
    use_host = block.levels_BO.is_cpu and block.scheme.type == "int"
    return reference.descend_block(
        block,
        curvature_product_BO=curvature_product_BO,
        scale_dtype=scale_dtype,
        descend=host.descend if use_host else reference.descend,
    )
