"""The correction of streams after a layer with alternating updates (AltUp, arXiv 2301.13310) in one launch,
with the product of the first by its scale, which the layer reads for the embeddings of tokens.

    s'_k = p_k + (1 + c_k) (y - p_0),   c = W_c r(y),   read = s'_0 scale

A program computes one row; as in `altup_predict`, a row's bits depend on nothing but the row.

Shapes: T rows, n streams, D hidden, E = n D.
"""

import torch
from torch import Tensor

from compress.kernels.altup_predict.fused import stream_options
from compress.kernels.compilers.triton import jit, launch_dependents, tl, triton, wait
from compress.kernels.operands.altup import AltUpWeights, altup_refusal, number_of, routed_row
from compress.kernels.rms_norm.fused import aligned
from compress.kernels.select import Kernel, register


@jit()
def _correct(
    y_ptr: tl.tensor,
    predicted_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    router_ptr: tl.tensor,
    correct_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    eps: tl.tensor,
    streams_ptr: tl.tensor,
    read_ptr: tl.tensor,
    N: tl.constexpr,
    N2: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    stream = tl.arange(0, N2)
    real = (stream < N)[:, None] & mask[None, :]
    router = tl.load(router_ptr + stream[:, None] * SIZE + columns[None, :], mask=real, other=0.0)
    norm = tl.load(norm_ptr + columns, mask=mask, other=0.0)
    given = (stream < N)[:, None] & (stream < N)[None, :]
    correct = tl.load(correct_ptr + stream[:, None] * N + stream[None, :], mask=given, other=0.0)
    scale = tl.load(scale_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    wait(PDL)
    y = tl.load(y_ptr + row * SIZE + columns, mask=mask, other=0.0)
    predicted_ptr += row * N * SIZE + columns
    streams_ptr += row * N * SIZE + columns
    predicted = ()
    for k in tl.static_range(N):
        predicted = predicted + (tl.load(predicted_ptr + k * SIZE, mask=mask, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    r = routed_row(y, norm, router, eps, SIZE)
    factors = tl.sum(correct * r[None, :], axis=1) + 1
    innovation = y.to(tl.float32) - predicted[0].to(tl.float32)
    for k in tl.static_range(N):
        total = predicted[k].to(tl.float32) + number_of(factors, k) * innovation
        after = total.to(streams_ptr.dtype.element_ty)
        tl.store(streams_ptr + k * SIZE, after, mask=mask)
        if k == 0:
            read = (after.to(tl.float32) * scale).to(after.dtype)
            tl.store(read_ptr + row * SIZE + columns, read, mask=mask)


def altup_correct(y_TD: Tensor, predicted_TE: Tensor, altup: AltUpWeights) -> tuple[Tensor, Tensor]:
    """Return the streams [T, n D] after a layer with the output y, and the first of them by its scale
    [T, D], which the layer reads for the embeddings of tokens."""
    num_rows, size = y_TD.shape
    n = altup.num_streams
    device = y_TD.device
    assert predicted_TE.shape == (num_rows, n * size)
    assert altup.router_nD.shape == (n, size)
    assert altup.correct_OI.shape == (n, n)
    assert not altup.norm.centered
    assert altup.norm.bias is None
    streams_TE = torch.empty(num_rows, n * size, dtype=y_TD.dtype, device=device)
    read_TD = torch.empty(num_rows, size, dtype=y_TD.dtype, device=device)
    if num_rows:
        _correct[(num_rows,)](
            aligned(y_TD),
            aligned(predicted_TE),
            altup.norm.weight,
            altup.router_nD,
            altup.correct_OI,
            altup.scale_D,
            altup.norm.eps,
            streams_TE,
            read_TD,
            N=n,
            N2=triton.next_power_of_2(n),
            enable_fp_fusion=False,  # the reference rounds products before it adds them
            **stream_options(size, device),
        )
    return streams_TE, read_TD


register(
    Kernel("altup_correct", "triton.row", min_sm=80, priority=10, supports=altup_refusal, fn=altup_correct)
)
