"""Reference W8A8 linear of e4m3 weights in blocks of 128 x 128 and e4m3 rows in groups of 128 columns
(DeepSeek-V3, arXiv 2412.19437, section 3.3):

    y = sum_g (x_values[:, g] W_codes[:, g]^T) x_scale[:, g] w_scale[block of the row, g],  groups g in order

Each product of 128 columns is a float32 product of its own; it is scaled in float32 and added to the sum
so far, and the sum is rounded once. A product of two e4m3 numbers is exact in float32, and would be in
TF32. Products have fixed shapes (`tiles.py` has the reason), so a row's bits depend on the row alone.

Codes are kept as float32 numbers, four bytes a weight, and every group is a product and two passes over
the result: this is the definition that faster kernels are tested against, not a way to serve.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compress.kernels.linear.coded import coded, finished, stacked_codes, stacked_scales
from compress.kernels.linear.row_product import ColumnBlocks, column_blocks, row_product
from compress.kernels.linear.tiles import DECODE_ROWS, PREFILL_ROWS, tile_refusal
from compress.kernels.operands.rows import QuantizedRows
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register
from compress.quant.scheme import QuantizedWeight

SCHEMES = ("FP8_BLOCK",)


@dataclass(frozen=True)
class PackedBlocks:
    """Codes as float32 numbers, a weight of N columns for each of G groups along I, and float32 scale [G,
    O] of each output row; `dtype` is the model's."""

    codes_G: tuple[ColumnBlocks, ...]
    scale_GO: Tensor
    dtype: torch.dtype


def repack(
    weights: Sequence[Tensor | QuantizedWeight], *, dtype: torch.dtype, device: torch.device, gated: bool
) -> PackedBlocks:
    """Stack weights along O; each linear's blocks begin with its own first row."""
    assert not gated, "the reference applies no activation"
    quantized = coded(weights)
    scale_OG = stacked_scales(quantized, device)
    codes_OGN = stacked_codes(quantized, device).to(torch.float32).view(*scale_OG.shape, -1)
    codes_G = tuple(column_blocks(codes_ON) for codes_ON in codes_OGN.unbind(1))
    return PackedBlocks(codes_G, scale_OG.t().contiguous(), dtype)


def linear(
    x: QuantizedRows,
    packed: PackedBlocks,
    bias_O: Tensor | None,
    *,
    rows: int,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x W^T, [T, O]; every matrix product has exactly `rows` rows."""
    assert x.scale_T.shape == (len(x.values_TK), len(packed.scale_GO)), (
        "rows have a scale for each group of columns"
    )
    x_GTN = x.values_TK.to(torch.float32).view(*x.scale_T.shape, -1).transpose(0, 1).contiguous()
    y_TO = x_GTN.new_zeros(len(x.values_TK), packed.scale_GO.shape[1])
    for x_TN, codes, x_scale_T, w_scale_O in zip(
        x_GTN, packed.codes_G, x.scale_T.t(), packed.scale_GO, strict=True
    ):
        y_TO += row_product(x_TN, codes, rows=rows) * x_scale_T.unsqueeze(1) * w_scale_O
    return finished(y_TO, packed.dtype if out_dtype is None else out_dtype, bias_O, residual_TO)


def _refusal(problem: Problem, *, few_rows: bool, device: str | None) -> str | None:
    if problem.scheme not in SCHEMES:
        return f"for {', '.join(SCHEMES)}"
    return tile_refusal(problem, few_rows=few_rows, device=device)


for _device, _rows in ((None, DECODE_ROWS), *PREFILL_ROWS.items()):
    _supports = partial(_refusal, few_rows=_device is None, device=_device)
    _name = f"reference.fp8_block.tile{_rows}"
    _fn = partial(linear, rows=_rows)
    register(Kernel("linear", _name, min_sm=0, priority=0, supports=_supports, fn=_fn, repack=repack))
