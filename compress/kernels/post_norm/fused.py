"""The end of a half-layer whose output is normed, in one launch: the norm, the sum with the residual stream
and, where the next linear reads the stream normed, that norm too, quantized if that linear needs it.

    s = scale round(x + norm(y)),   rows = following(s)

One program has one row of each in registers; rounding follows the reference. Weights are constant, so they
are read before the program waits for the kernel ahead.
"""

from typing import Any

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, tl, wait
from compress.kernels.operands.rows import ActivationQuant, QuantizedRows, RowNorm
from compress.kernels.quantize_rows.fused import row_options, row_output, row_refusal, store_row
from compress.kernels.rms_norm.fused import aligned, normed_row
from compress.kernels.select import Kernel, register


@jit()
def _post_norm(
    y_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    following_ptr: tl.tensor,
    eps: tl.tensor,
    following_eps: tl.tensor,
    scale: tl.tensor,
    sum_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    static_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    static_zero_ptr: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANT: tl.constexpr,
    GROUP: tl.constexpr,
    CONVERTS: tl.constexpr,
    CENTERED: tl.constexpr,
    FOLLOWING_CENTERED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    if following_ptr is not None:
        following = tl.load(following_ptr + columns, mask=mask, other=0.0)
    wait(PDL)
    at = row.to(tl.int64) * SIZE + columns
    y = tl.load(y_ptr + at, mask=mask, other=0.0)
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    normed = normed_row(y, weight, eps, SIZE, CENTERED)
    total = (x.to(tl.float32) + normed.to(tl.float32)).to(x.dtype)
    total = (total.to(tl.float32) * scale).to(x.dtype)
    tl.store(sum_ptr + at, total, mask=mask)
    if following_ptr is not None:
        rows = normed_row(total, following, following_eps, SIZE, FOLLOWING_CENTERED)
        store_row(
            rows, row, out_ptr, scale_ptr, static_ptr, zero_ptr, static_zero_ptr,
            SIZE, BLOCK, QUANT, GROUP, CONVERTS,
        )  # fmt: skip


def post_norm(
    y_TD: Tensor,
    x_TD: Tensor,
    norm: RowNorm,
    following: RowNorm | None = None,
    quant: ActivationQuant | None = None,
    *,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor | QuantizedRows | None]:
    """Return the sum [T, D], multiplied by `scale`, and its norm by `following`, quantized if the next linear
    needs it."""
    num_rows, size = x_TD.shape
    dtype = x_TD.dtype
    for each in (norm, following):
        assert each is None or (each.weight.shape == (size,) and each.weight.dtype in (dtype, torch.float32))
    sum_TD = torch.empty(num_rows, size, dtype=dtype, device=x_TD.device)
    rows: Tensor | QuantizedRows | None = None
    output: dict[str, Any] = dict.fromkeys(
        ("out_ptr", "scale_ptr", "static_ptr", "zero_ptr", "static_zero_ptr")
    )
    output |= {"QUANT": 0, "GROUP": 0, "CONVERTS": False}
    if following is not None:
        rows, output = row_output(num_rows, size, dtype, x_TD.device, quant)
    _post_norm[(num_rows,)](
        aligned(y_TD),
        aligned(x_TD),
        norm.weight,
        None if following is None else following.weight,
        norm.eps,
        0.0 if following is None else following.eps,
        scale,
        sum_TD,
        CENTERED=norm.centered,
        FOLLOWING_CENTERED=following is not None and following.centered,
        enable_fp_fusion=False,  # fused, the sum would keep bits of the norm that the reference rounds away
        **output,
        **_options(size, x_TD.device),
    )
    return sum_TD, rows


def _options(size: int, device: torch.device) -> dict[str, Any]:
    """Launch options: 8 elements a thread, 16 bytes of each row. With 16 a token of Gemma 3 12B took 13 us
    longer, with 32 25 us (H200, 96 launches a token)."""
    options = row_options(size, device)
    return {**options, "num_warps": min(max(options["BLOCK"] // 256, 1), 32)}


register(Kernel("post_norm", "triton.row", min_sm=80, priority=10, supports=row_refusal, fn=post_norm))
