"""The beginning of a half-layer with hyper-connections (arXiv 2512.24880), in two launches: the logits of the
factors as partial products of chunks of columns, and the factors, the mixture of the streams and its norm,
quantized if the next linear needs it, one row a program.

A program of the first launch reads its chunk of the matrix once for `ROWS` rows. Chunks and tiles have one
shape, and partial products are added in the order of the second launch's tile, so a row's bits depend on
nothing but the row.

Shapes: T rows, n streams, D hidden, E = n D, M logits.
"""

from typing import Any

import torch
from torch import Tensor

from compress.kernels.compilers.triton import (
    jit,
    launch_dependents,
    pdl_options,
    tl,
    triton,
    wait,
)
from compress.kernels.operands.hyper import HyperWeights
from compress.kernels.operands.rows import ActivationQuant, QuantizedRows, RowNorm
from compress.kernels.problem import Problem
from compress.kernels.quantize_rows.fused import row_options, row_output, row_refusal, store_row
from compress.kernels.rms_norm.fused import aligned, normed_row
from compress.kernels.select import Kernel, register

ROWS = 4
"""Rows that one program multiplies by its chunk of the matrix."""
COLUMNS = 512
"""Columns of a chunk: 11264 numbers of four streams of 2816 are those of 22 programs."""
MOST_NUMBERS = 16_384
"""Products of all chunks that one program adds up, at most, 128 a thread."""


@jit(varying=("num_rows",))
def _partial_logits(
    streams_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    NUM_LOGITS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Write the products of a chunk of the streams with its columns of the matrix, and after these the sum of
    squares: [T, chunks, M + 1]."""
    launch_dependents(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    chunk = tl.program_id(1)
    columns = chunk * COLUMNS + tl.arange(0, COLUMNS)
    real = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    wait(PDL)
    at = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    x = tl.load(streams_ptr + at, mask=real, other=0.0).to(tl.float32)
    into = partial_ptr + (rows.to(tl.int64) * NUM_CHUNKS + chunk) * (NUM_LOGITS + 1)
    for idx in range(NUM_LOGITS):
        weight = tl.load(weight_ptr + idx * WIDTH + columns, mask=columns < WIDTH, other=0.0)
        tl.store(into + idx, tl.sum(x * weight[None, :], axis=1), mask=rows < num_rows)
    tl.store(into + NUM_LOGITS, tl.sum(x * x, axis=1), mask=rows < num_rows)


@jit()
def _sigmoid(x: tl.tensor) -> tl.tensor:
    return 1 / (1 + tl.exp(-x))


@jit()
def _mix(
    streams_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    gains_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    eps: tl.tensor,
    square_eps: tl.tensor,
    norm_eps: tl.tensor,
    post_factor: tl.tensor,
    post_eps: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    static_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    static_zero_ptr: tl.tensor,
    N: tl.constexpr,
    N2: tl.constexpr,
    NUM_LOGITS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS2: tl.constexpr,
    ITERATIONS: tl.constexpr,
    NUM_FACTORS: tl.constexpr,
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
    norm = tl.load(norm_ptr + columns, mask=columns < SIZE, other=0.0)
    stream = tl.arange(0, N2)
    pre_bias = tl.load(bias_ptr + stream, mask=stream < N, other=0.0)
    pre_gain = tl.load(gains_ptr)
    wait(PDL)
    chunk = tl.arange(0, CHUNKS2)
    partial_ptr += row * NUM_CHUNKS * (NUM_LOGITS + 1)
    of_chunk = partial_ptr + chunk * (NUM_LOGITS + 1)
    squares = tl.sum(tl.load(of_chunk + NUM_LOGITS, mask=chunk < NUM_CHUNKS, other=0.0), axis=0)
    inverse = tl.rsqrt(squares / (N * SIZE) + square_eps)
    of_streams = of_chunk[:, None] + stream[None, :]
    real = (chunk < NUM_CHUNKS)[:, None] & (stream < N)[None, :]
    pre = tl.sum(tl.load(of_streams, mask=real, other=0.0), axis=0) * inverse
    pre = _sigmoid(pre * pre_gain + pre_bias) + eps
    if NUM_FACTORS > 0:
        factors_ptr += row * NUM_FACTORS
        post = tl.sum(tl.load(of_streams + N, mask=real, other=0.0), axis=0) * inverse
        post_bias = tl.load(bias_ptr + N + stream, mask=stream < N, other=0.0)
        post = post_factor * _sigmoid(post * tl.load(gains_ptr + 1) + post_bias) + post_eps
        tl.store(factors_ptr + stream, post, mask=stream < N)
    if ITERATIONS > 0:
        place = stream[:, None] * N + stream[None, :]
        both = (stream < N)[:, None] & (stream < N)[None, :]
        of_pairs = of_chunk[:, None, None] + (2 * N + place)[None, :, :]
        given = (chunk < NUM_CHUNKS)[:, None, None] & both[None, :, :]
        logits = tl.sum(tl.load(of_pairs, mask=given, other=0.0), axis=0) * inverse
        bias = tl.load(bias_ptr + 2 * N + place, mask=both, other=0.0)
        logits = tl.where(both, logits * tl.load(gains_ptr + 2) + bias, float("-inf"))
        least = tl.where(stream < N, eps, 1.0)  # of what is no stream: the sum must not be 0
        most = tl.max(tl.where(both, logits, -3.0e38), axis=1)
        mixing = tl.where(both, tl.exp(logits - most[:, None]), 0.0)
        mixing /= tl.where(stream < N, tl.sum(mixing, axis=1), 1.0)[:, None]
        mixing = tl.where(both, mixing + eps, 0.0)
        mixing /= (tl.sum(mixing, axis=0) + least)[None, :]
        for _ in range(ITERATIONS - 1):
            mixing /= (tl.sum(mixing, axis=1) + least)[:, None]
            mixing /= (tl.sum(mixing, axis=0) + least)[None, :]
        tl.store(factors_ptr + N + place, mixing, mask=both)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    streams_ptr += row * N * SIZE + columns
    for idx in tl.static_range(N):
        factor = tl.sum(tl.where(stream == idx, pre, 0.0), axis=0)
        total += tl.load(streams_ptr + idx * SIZE, mask=columns < SIZE, other=0.0).to(tl.float32) * factor
    x = total.to(streams_ptr.dtype.element_ty)
    store_row(
        normed_row(x, norm, norm_eps, SIZE, False),
        row, out_ptr, scale_ptr, static_ptr, zero_ptr, static_zero_ptr, SIZE, BLOCK, QUANT, GROUP, CONVERTS,
    )  # fmt: skip


def hyper_mix(
    streams_TE: Tensor, hyper: HyperWeights, norm: RowNorm, quant: ActivationQuant | None = None
) -> tuple[Tensor | QuantizedRows, Tensor | None]:
    """Return the norm [T, D] of the mixture of the streams, quantized if the next linear needs it, and the
    factors of the end of the half-layer, float32 [T, F]; None for the head."""
    num_rows, width = streams_TE.shape
    facts = hyper.facts
    n = facts.num_streams
    size = width // n
    num_logits = len(hyper.bias_M)
    assert hyper.weight_ME.shape == (num_logits, width)
    assert norm.weight.shape == (size,)
    assert not norm.centered
    assert norm.bias is None
    streams_TE = aligned(streams_TE)
    device = streams_TE.device
    num_chunks = triton.cdiv(width, COLUMNS)
    partial = torch.empty(num_rows, num_chunks, num_logits + 1, dtype=torch.float32, device=device)
    num_factors = 0 if hyper.of_head else num_logits - n
    factors_TF = torch.empty(num_rows, num_factors, dtype=torch.float32, device=device)
    rows, output = row_output(num_rows, size, streams_TE.dtype, device, quant)
    if num_rows:
        _partial_logits[(triton.cdiv(num_rows, ROWS), num_chunks)](
            streams_TE,
            hyper.weight_ME,
            partial,
            num_rows,
            WIDTH=width,
            NUM_LOGITS=num_logits,
            NUM_CHUNKS=num_chunks,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=4,
            **pdl_options(device),
        )
        _mix[(num_rows,)](
            streams_TE,
            partial,
            hyper.bias_M,
            hyper.gains,
            norm.weight,
            factors_TF,
            facts.eps,
            hyper.norm_eps,
            norm.eps,
            facts.post_factor,
            facts.post_eps,
            N=n,
            N2=triton.next_power_of_2(n),
            NUM_LOGITS=num_logits,
            NUM_CHUNKS=num_chunks,
            CHUNKS2=triton.next_power_of_2(num_chunks),
            ITERATIONS=0 if hyper.of_head else facts.sinkhorn_iterations,
            NUM_FACTORS=num_factors,
            **output,
            **_options(size, device),
        )
    return rows, factors_TF if num_factors else None


def _options(size: int, device: torch.device) -> dict[str, Any]:
    """Launch options: those of a row, four warps or more, which also add the partial products."""
    options = row_options(size, device)
    return {**options, "num_warps": max(options["num_warps"], 4)}


def _supports(problem: Problem) -> str | None:
    n = triton.next_power_of_2(problem.k) if problem.k else 1
    numbers = triton.next_power_of_2(triton.cdiv(problem.n * max(problem.k, 1), COLUMNS)) * n * n
    if numbers > MOST_NUMBERS:
        return f"{problem.k} streams of {problem.n} numbers, of which a program would add {numbers} products."
    return row_refusal(problem)


register(Kernel("hyper_mix", "triton.row", min_sm=80, priority=10, supports=_supports, fn=hyper_mix))
