"""The end of a layer with alternating updates and embeddings of tokens for each layer, in one launch: the
norm of a row is added to all streams but the first.

    s'_k = s_k + round(norm(y)),   k > 0

The streams are changed in place, so the first is neither read nor written. One program computes one row;
rounding follows the reference.

Shapes: T rows, n streams, D hidden, E = n D.
"""

from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, tl, wait
from compress.kernels.operands.rows import RowNorm
from compress.kernels.quantize_rows.fused import row_options, row_refusal
from compress.kernels.rms_norm.fused import aligned, normed_row
from compress.kernels.select import Kernel, register


@jit()
def _add(
    y_ptr: tl.tensor,
    streams_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    eps: tl.tensor,
    N: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    norm = tl.load(norm_ptr + columns, mask=mask, other=0.0)
    wait(PDL)
    y = tl.load(y_ptr + row * SIZE + columns, mask=mask, other=0.0)
    term = normed_row(y, norm, eps, SIZE, False).to(tl.float32)
    streams_ptr += row * N * SIZE + columns
    for k in tl.static_range(1, N):
        total = tl.load(streams_ptr + k * SIZE, mask=mask, other=0.0).to(tl.float32) + term
        tl.store(streams_ptr + k * SIZE, total.to(streams_ptr.dtype.element_ty), mask=mask)


def altup_add_(y_TD: Tensor, streams_TE: Tensor, norm: RowNorm) -> Tensor:
    """Add the norm of y to all streams [T, n D] but the first, in place, and return them."""
    num_rows, size = y_TD.shape
    assert norm.weight.shape == (size,)
    assert not norm.centered
    assert norm.bias is None
    assert streams_TE.is_contiguous()
    if num_rows:
        _add[(num_rows,)](
            aligned(y_TD),
            streams_TE,
            norm.weight,
            norm.eps,
            N=streams_TE.shape[1] // size,
            enable_fp_fusion=False,  # fused, the sum would keep bits that the reference rounds away
            **row_options(size, y_TD.device),
        )
    return streams_TE


register(Kernel("altup_add", "triton.row", min_sm=80, priority=10, supports=row_refusal, fn=altup_add_))
