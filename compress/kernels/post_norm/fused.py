"""The end of a half-layer whose output is normed, in one launch: the norm, the sum with the residual stream
and, where the next linear reads the stream normed, that norm too, quantized if that linear needs it. Up to
two more norms of the stream are for other readers.

    s = scale round(x + norm(y)),   rows = following(s),   y may be round(norm_a(a) + norm_b(b))

With LAuReL, x is round(x + h + norm_l(l)). x may be columns of wider rows.

One program has one row of each in registers; rounding follows the reference. Weights are constant, so they
are read before the program waits for the kernel ahead.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, tl, wait
from compress.kernels.operands.rows import (
    ActivationQuant,
    Branch,
    LaurelRows,
    QuantizedRows,
    RowNorm,
)
from compress.kernels.quantize_rows.fused import row_options, row_output, row_refusal, store_row
from compress.kernels.rms_norm.fused import aligned, are_columns, normed_row
from compress.kernels.select import Kernel, register

MOST_OTHERS = 2
"""Most norms of the stream for other readers than the next linear."""


@jit()
def _post_norm(
    y_ptr: tl.tensor,
    branch_ptr: tl.tensor,
    x_ptr: tl.tensor,
    beside_ptr: tl.tensor,
    low_rank_ptr: tl.tensor,
    y_weight_ptr: tl.tensor,
    branch_weight_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    following_ptr: tl.tensor,
    first_ptr: tl.tensor,
    second_ptr: tl.tensor,
    low_rank_weight_ptr: tl.tensor,
    y_eps: tl.tensor,
    branch_eps: tl.tensor,
    eps: tl.tensor,
    following_eps: tl.tensor,
    first_eps: tl.tensor,
    second_eps: tl.tensor,
    low_rank_eps: tl.tensor,
    scale: tl.tensor,
    sum_ptr: tl.tensor,
    first_out_ptr: tl.tensor,
    second_out_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    static_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    static_zero_ptr: tl.tensor,
    X_STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANT: tl.constexpr,
    GROUP: tl.constexpr,
    CONVERTS: tl.constexpr,
    CENTERED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    if branch_ptr is not None:
        y_weight = tl.load(y_weight_ptr + columns, mask=mask, other=0.0)
        branch_weight = tl.load(branch_weight_ptr + columns, mask=mask, other=0.0)
    if following_ptr is not None:
        following = tl.load(following_ptr + columns, mask=mask, other=0.0)
    if first_ptr is not None:
        first = tl.load(first_ptr + columns, mask=mask, other=0.0)
    if second_ptr is not None:
        second = tl.load(second_ptr + columns, mask=mask, other=0.0)
    if low_rank_ptr is not None:
        low_rank_weight = tl.load(low_rank_weight_ptr + columns, mask=mask, other=0.0)
    wait(PDL)
    at = row.to(tl.int64) * SIZE + columns
    y = tl.load(y_ptr + at, mask=mask, other=0.0)
    x = tl.load(x_ptr + row.to(tl.int64) * X_STRIDE + columns, mask=mask, other=0.0)
    if branch_ptr is not None:
        branch = tl.load(branch_ptr + at, mask=mask, other=0.0)
        y = normed_row(y, y_weight, y_eps, SIZE, CENTERED)
        branch = normed_row(branch, branch_weight, branch_eps, SIZE, CENTERED)
        y = (y.to(tl.float32) + branch.to(tl.float32)).to(x.dtype)
    if low_rank_ptr is not None:
        beside = tl.load(beside_ptr + at, mask=mask, other=0.0)
        low_rank = tl.load(low_rank_ptr + at, mask=mask, other=0.0)
        low_rank = normed_row(low_rank, low_rank_weight, low_rank_eps, SIZE, CENTERED)
        x = (x.to(tl.float32) + beside.to(tl.float32) + low_rank.to(tl.float32)).to(x.dtype)
    normed = normed_row(y, weight, eps, SIZE, CENTERED)
    total = (x.to(tl.float32) + normed.to(tl.float32)).to(x.dtype)
    total = (total.to(tl.float32) * scale).to(x.dtype)
    tl.store(sum_ptr + at, total, mask=mask)
    if following_ptr is not None:
        rows = normed_row(total, following, following_eps, SIZE, CENTERED)
        store_row(
            rows, row, out_ptr, scale_ptr, static_ptr, zero_ptr, static_zero_ptr,
            SIZE, BLOCK, QUANT, GROUP, CONVERTS,
        )  # fmt: skip
    if first_ptr is not None:
        tl.store(first_out_ptr + at, normed_row(total, first, first_eps, SIZE, CENTERED), mask=mask)
    if second_ptr is not None:
        tl.store(second_out_ptr + at, normed_row(total, second, second_eps, SIZE, CENTERED), mask=mask)


def post_norm(
    y: Tensor | tuple[Branch, Branch],
    x_TD: Tensor,
    norm: RowNorm,
    following: RowNorm | None = None,
    quant: ActivationQuant | None = None,
    *,
    also: Sequence[RowNorm] = (),
    scale: float = 1.0,
    laurel: LaurelRows | None = None,
) -> tuple[Tensor, Tensor | QuantizedRows | None, tuple[Tensor, ...]]:
    """Return the sum [T, D] of x and the norm of y, multiplied by `scale`, its norm by `following`, quantized
    if the next linear needs it, and its norms by `also`. Of two branches, y is the sum of their norms. With
    `laurel`, x is the sum of x and of its terms."""
    num_rows, size = x_TD.shape
    dtype = x_TD.dtype
    branches = y if isinstance(y, tuple) else (None, None)
    norms = (*(None if each is None else each.norm for each in branches), norm, following, *also)
    norms += (None,) * (MOST_OTHERS - len(also))
    norms += (None if laurel is None else laurel.low_rank.norm,)
    for each in norms:
        assert each is None or (each.weight.shape == (size,) and each.weight.dtype in (dtype, torch.float32))
        assert each is None or each.centered == norm.centered
    sum_TD = torch.empty(num_rows, size, dtype=dtype, device=x_TD.device)
    others = tuple(torch.empty_like(sum_TD) for _ in also)
    rows: Tensor | QuantizedRows | None = None
    output: dict[str, Any] = dict.fromkeys(
        ("out_ptr", "scale_ptr", "static_ptr", "zero_ptr", "static_zero_ptr")
    )
    output |= {"QUANT": 0, "GROUP": 0, "CONVERTS": False}
    if following is not None:
        rows, output = row_output(num_rows, size, dtype, x_TD.device, quant)
    x_TD = x_TD if are_columns(x_TD) else aligned(x_TD)
    beside = (None, None) if laurel is None else (laurel.rows_TD, laurel.low_rank.values_TD)
    first, second = (aligned(each.values_TD) for each in y) if isinstance(y, tuple) else (aligned(y), None)
    _post_norm[(num_rows,)](
        first,
        second,
        x_TD,
        *(None if each is None else aligned(each) for each in beside),
        *(None if each is None else each.weight for each in norms),
        *(0.0 if each is None else each.eps for each in norms),
        scale,
        sum_TD,
        *others,
        *(None,) * (MOST_OTHERS - len(also)),
        X_STRIDE=x_TD.stride(0),
        CENTERED=norm.centered,
        enable_fp_fusion=False,  # fused, the sum would keep bits of the norm that the reference rounds away
        **output,
        **_options(size, x_TD),
    )
    return sum_TD, rows, others


def _options(size: int, x_TD: Tensor) -> dict[str, Any]:
    """Launch options: 16 bytes of each row a thread, 8 elements of 16 bits. With 16 a token of Gemma 3 12B
    took 13 us longer, with 32 25 us (H200, 96 launches a token). With more bytes of float32, threads would
    hold other elements where rows leave quantized, and sum them in another order."""
    options = row_options(size, x_TD.device)
    of_warp = 32 * 16 // x_TD.element_size()
    return {**options, "num_warps": min(max(options["BLOCK"] // of_warp, 1), 32)}


register(Kernel("post_norm", "triton.row", min_sm=80, priority=10, supports=row_refusal, fn=post_norm))
