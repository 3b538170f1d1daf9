"""The prediction of streams before a layer with alternating updates (AltUp, arXiv 2301.13310) in one launch,
with the norm of the first, quantized if the next linear needs it.

    p_k = s_k + sum_j P_kj s_j,   P = W_P r(s_0),   rows = following(p_0)

A program has all streams of one row in registers, and its shape follows from their sizes alone, so that a
row's bits depend on nothing but the row. Weights are constant, so they are read before the program waits for
the kernel ahead. Sums over streams are in their order, and rounded once, as in the reference.

Shapes: T rows, n streams, D hidden, E = n D.
"""

from typing import Any

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, tl, triton, wait
from compress.kernels.operands.altup import AltUpWeights, altup_refusal, number_of, routed_row
from compress.kernels.operands.rows import ActivationQuant, QuantizedRows, RowNorm
from compress.kernels.quantize_rows.fused import row_options, row_output, store_row
from compress.kernels.rms_norm.fused import aligned, normed_row
from compress.kernels.select import Kernel, register


@jit()
def _predict(
    streams_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    router_ptr: tl.tensor,
    predict_ptr: tl.tensor,
    following_ptr: tl.tensor,
    eps: tl.tensor,
    following_eps: tl.tensor,
    predicted_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    static_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    static_zero_ptr: tl.tensor,
    N: tl.constexpr,
    N2: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANT: tl.constexpr,
    GROUP: tl.constexpr,
    CONVERTS: tl.constexpr,
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
    place = tl.arange(0, N2 * N2)
    given = (place < N * N)[:, None] & (stream < N)[None, :]
    predict = tl.load(predict_ptr + place[:, None] * N + stream[None, :], mask=given, other=0.0)
    if following_ptr is not None:
        following = tl.load(following_ptr + columns, mask=mask, other=0.0)
    wait(PDL)
    streams_ptr += row * N * SIZE + columns
    predicted_ptr += row * N * SIZE + columns
    streams = ()
    for k in tl.static_range(N):
        streams = streams + (tl.load(streams_ptr + k * SIZE, mask=mask, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    r = routed_row(streams[0], norm, router, eps, SIZE)
    mixing = tl.sum(predict * r[None, :], axis=1)
    for k in tl.static_range(N):
        total = streams[k].to(tl.float32)  # type: ignore[var-annotated]
        for j in tl.static_range(N):
            total += number_of(mixing, k * N + j) * streams[j].to(tl.float32)
        after = total.to(predicted_ptr.dtype.element_ty)
        tl.store(predicted_ptr + k * SIZE, after, mask=mask)
        if k == 0 and following_ptr is not None:
            store_row(
                normed_row(after, following, following_eps, SIZE, False),
                row, out_ptr, scale_ptr, static_ptr, zero_ptr, static_zero_ptr,
                SIZE, BLOCK, QUANT, GROUP, CONVERTS,
            )  # fmt: skip


def altup_predict(
    streams_TE: Tensor,
    altup: AltUpWeights,
    following: RowNorm | None = None,
    quant: ActivationQuant | None = None,
) -> tuple[Tensor, Tensor | QuantizedRows | None]:
    """Return the predicted streams [T, n D], and the norm by `following` of the first of them [T, D],
    quantized if the next linear needs it; None without `following`."""
    num_rows, width = streams_TE.shape
    n = altup.num_streams
    size = width // n
    device = streams_TE.device
    assert altup.router_nD.shape == (n, size)
    assert altup.predict_OI.shape == (n * n, n)
    for each in (altup.norm, following):
        assert each is None or (each.weight.shape == (size,) and not each.centered and each.bias is None)
    predicted_TE = torch.empty(num_rows, width, dtype=streams_TE.dtype, device=device)
    rows: Tensor | QuantizedRows | None = None
    output: dict[str, Any] = dict.fromkeys(
        ("out_ptr", "scale_ptr", "static_ptr", "zero_ptr", "static_zero_ptr")
    )
    output |= {"QUANT": 0, "GROUP": 0, "CONVERTS": False}
    if following is not None:
        rows, output = row_output(num_rows, size, streams_TE.dtype, device, quant)
    if num_rows:
        _predict[(num_rows,)](
            aligned(streams_TE),
            altup.norm.weight,
            altup.router_nD,
            altup.predict_OI,
            None if following is None else following.weight,
            altup.norm.eps,
            0.0 if following is None else following.eps,
            predicted_TE,
            N=n,
            N2=triton.next_power_of_2(n),
            enable_fp_fusion=False,  # the reference rounds products before it adds them
            **output,
            **stream_options(size, device),
        )
    return predicted_TE, rows


def stream_options(size: int, device: torch.device) -> dict[str, Any]:
    """Launch options of a program that holds all streams of a row: 8 numbers of each a thread, four warps or
    more."""
    options = row_options(size, device)
    return {**options, "num_warps": min(max(options["BLOCK"] // 256, 4), 32)}


register(
    Kernel("altup_predict", "triton.row", min_sm=80, priority=10, supports=altup_refusal, fn=altup_predict)
)
