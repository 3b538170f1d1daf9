"""The beginning of a half-layer with gated residuals (`models/gated_residual.py`) in two launches for few
rows: the time is that of reading the matrices.

The first launch multiplies chunks of a stream by their columns of W_down and W_q. A chunk is divided by its
own root mean square, which keeps it in the range of 16 bits, and its product is multiplied by it again; the
sums of squares of the chunks are those of the norm. A program of the second launch adds the products of the
chunks in their order, each stream's times the inverse of its root mean square, and multiplies what silu makes
of them by the rows of W_up of a few columns of all streams.

Programs hold their numbers of a matrix, read before they wait for the kernel ahead. Tiles have 16 rows for
every T, and sums one order, so that a row's bits depend on nothing but the row.

Shapes: T rows, n streams, D hidden, E = n D, R the rank of the gates, F = R + n, or R for the head.
"""

import torch
from torch import Tensor

from compress.kernels.compilers.triton import (
    jit,
    launch_dependents,
    pdl_options,
    tl,
    triton,
    triton_refusal,
    wait,
)
from compress.kernels.operands.activation import activated
from compress.kernels.operands.gated import GatedMatrices, gated_matrices
from compress.kernels.operands.rows import RowNorm
from compress.kernels.problem import Problem
from compress.kernels.rms_norm.fused import aligned
from compress.kernels.select import Kernel, register

ROWS = 16
COLUMNS = 1024
"""Columns of a chunk: 8192 numbers of four streams of 2048 are those of 8 chunks."""
OUTPUTS = 16
"""Rows of W_down and W_q of a program: 324 of them and 8 chunks are 168 programs of 32 KB."""
DOWN_WARPS = 4
PARTS = 4
"""Parts of the columns of a chunk, whose products are those of different warps and are added at the end."""
HELD_BYTES = 65536
"""Bytes of W_up that a program holds, at most."""
PLACES = 64
"""Most rows of W_up of a program: 16 columns of four streams."""
UP_WARPS = 8
MAX_RANK = 1024
PROGRAMS = 4
"""Most programs that share the tiles of rows of one part of a matrix."""
ALIGNMENT = 4
"""Numbers of a vector of products: rows of sums begin at multiples of it."""


@jit(varying=("num_rows",))
def _products(
    streams_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    num_rows: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    STRIDE: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Write the products of a chunk, of which a stream has CHUNKS, and after these its sum of squares:
    [T, n CHUNKS, STRIDE]."""
    launch_dependents(PDL)
    chunk = tl.program_id(1)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    columns = chunk % CHUNKS * COLUMNS + tl.arange(0, COLUMNS)
    real = columns < SIZE
    at = chunk // CHUNKS * SIZE + columns
    w = tl.load(
        weight_ptr + outputs.to(tl.int64)[:, None] * WIDTH + at[None, :],
        mask=(outputs < OUT)[:, None] & real[None, :],
        other=0.0,
    )
    factors = tl.load(norm_ptr + at, mask=real, other=0.0)
    w_parts = tl.permute(tl.reshape(w, [OUTPUTS, PARTS, COLUMNS // PARTS]), [1, 2, 0])
    wait(PDL)
    for tile in tl.range(tl.program_id(2), tl.cdiv(num_rows, ROWS), tl.num_programs(2)):
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        is_row = rows < num_rows
        x = tl.load(
            streams_ptr + rows[:, None] * WIDTH + at[None, :], mask=is_row[:, None] & real[None, :], other=0.0
        ).to(tl.float32)
        squares = tl.sum(x * x, axis=1)
        root = tl.sqrt(squares / COLUMNS + 1e-30)
        scaled = (x * (1 / root)[:, None] * factors[None, :]).to(w.dtype)
        parts = tl.permute(tl.reshape(scaled, [ROWS, PARTS, COLUMNS // PARTS]), [1, 0, 2])
        y = tl.sum(tl.dot(parts, w_parts, input_precision=PRECISION), axis=0) * root[:, None]
        into = sums_ptr + (rows * tl.num_programs(1) + chunk) * STRIDE
        tl.store(into[:, None] + outputs[None, :], y, mask=is_row[:, None] & (outputs < OUT)[None, :])
        if tl.program_id(0) == 0:
            tl.store(into + OUT, squares, mask=is_row)


@jit(varying=("num_rows",))
def _mix(
    streams_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    eps: tl.tensor,
    num_rows: tl.tensor,
    N: tl.constexpr,
    N2: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    RANK2: tl.constexpr,
    OUT: tl.constexpr,
    STRIDE: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Write COLUMNS columns of the mixtures; the first program also writes the factors of the output."""
    launch_dependents(PDL)
    place = tl.arange(0, N2 * COLUMNS)
    stream = place // COLUMNS
    column = tl.program_id(0) * COLUMNS + place % COLUMNS
    real = (stream < N) & (column < SIZE)
    at = stream * SIZE + column
    rank = tl.arange(0, RANK2)
    w = tl.load(
        up_ptr + at.to(tl.int64)[:, None] * RANK + rank[None, :],
        mask=real[:, None] & (rank < RANK)[None, :],
        other=0.0,
    )
    factors = tl.load(norm_ptr + at, mask=real, other=0.0)
    wait(PDL)
    for tile in tl.range(tl.program_id(1), tl.cdiv(num_rows, ROWS), tl.num_programs(1)):
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        is_row = rows < num_rows
        x = tl.load(
            streams_ptr + rows[:, None] * (N * SIZE) + at[None, :],
            mask=is_row[:, None] & real[None, :],
            other=0.0,
        ).to(tl.float32)
        of_row = sums_ptr + rows * (N * CHUNKS * STRIDE)
        given = is_row[:, None] & (rank < RANK)[None, :]
        low = tl.zeros([ROWS, RANK2], dtype=tl.float32)
        inverses = tl.zeros([ROWS, N2 * COLUMNS], dtype=tl.float32)
        for i in tl.static_range(N):
            part = tl.zeros([ROWS, RANK2], dtype=tl.float32)
            squares = tl.zeros([ROWS], dtype=tl.float32)
            for c in tl.static_range(CHUNKS):
                of_chunk = of_row + (i * CHUNKS + c) * STRIDE
                part += tl.load(of_chunk[:, None] + rank[None, :], mask=given, other=0.0)
                squares += tl.load(of_chunk + OUT, mask=is_row, other=0.0)
            inverse = tl.rsqrt(squares / SIZE + eps)
            low += part * inverse[:, None]
            inverses = tl.where((stream == i)[None, :], inverse[:, None], inverses)
        low = activated(low / N, "silu").to(w.dtype)
        gates = activated(tl.dot(low, tl.trans(w), input_precision=PRECISION), "sigmoid")
        mixed = tl.reshape(gates * (x * inverses * factors[None, :]), [ROWS, N2, COLUMNS])
        total = tl.sum(mixed, axis=1) / N
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        tl.store(
            out_ptr + rows[:, None] * SIZE + columns[None, :],
            total.to(out_ptr.dtype.element_ty),
            mask=is_row[:, None] & (columns < SIZE)[None, :],
        )
        if OUT > RANK:
            _write_factors(factors_ptr, of_row, eps, rows, is_row, N, N2, SIZE, RANK, OUT, STRIDE, CHUNKS)


@jit()
def _write_factors(
    factors_ptr: tl.tensor,
    of_row: tl.tensor,
    eps: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    N: tl.constexpr,
    N2: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    OUT: tl.constexpr,
    STRIDE: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Write the factors of the outputs of some rows, in the first program."""
    if tl.program_id(0) == 0:
        each = tl.arange(0, N2)
        given = is_row[:, None] & (each < N)[None, :]
        logits = tl.zeros([rows.shape[0], N2], dtype=tl.float32)
        for i in tl.static_range(N):
            part = tl.zeros([rows.shape[0], N2], dtype=tl.float32)
            squares = tl.zeros([rows.shape[0]], dtype=tl.float32)
            for c in tl.static_range(CHUNKS):
                of_chunk = of_row + (i * CHUNKS + c) * STRIDE
                part += tl.load(of_chunk[:, None] + RANK + each[None, :], mask=given, other=0.0)
                squares += tl.load(of_chunk + OUT, mask=is_row, other=0.0)
            logits += part * tl.rsqrt(squares / SIZE + eps)[:, None]
        injected = 2 * activated(logits / N, "sigmoid")
        tl.store(factors_ptr + rows[:, None] * N + each[None, :], injected, mask=given)


def gated_mix(streams_TE: Tensor, packed: GatedMatrices, norm: RowNorm) -> tuple[Tensor, Tensor | None]:
    """Return the mixture of the streams [T, D], and the factors by which the output of the half-layer is
    added to each stream, float32 [T, n]; None for the head. The weights [n, D] of the norm are float32."""
    num_rows, width = streams_TE.shape
    n, size = norm.weight.shape
    num_outputs = packed.down_FE.shape[0]
    rank = packed.up_ER.shape[1]
    assert packed.down_FE.shape[1] == packed.up_ER.shape[0] == width == n * size
    assert packed.num_factors in (0, n)
    streams_TE = aligned(streams_TE)
    device = streams_TE.device
    columns = min(COLUMNS, max(16 * PARTS, triton.next_power_of_2(size)))
    chunks = triton.cdiv(size, columns)
    stride = -(-(num_outputs + 1) // ALIGNMENT) * ALIGNMENT
    sums = torch.empty(num_rows, n * chunks, stride, dtype=torch.float32, device=device)
    mixed_TD = torch.empty(num_rows, size, dtype=streams_TE.dtype, device=device)
    factors_Tn = torch.empty(num_rows, packed.num_factors, dtype=torch.float32, device=device)
    shared = {
        "SIZE": size,
        "OUT": num_outputs,
        "STRIDE": stride,
        "CHUNKS": chunks,
        "ROWS": ROWS,
        "PRECISION": "ieee" if streams_TE.dtype == torch.float32 else "tf32",
        **pdl_options(device),
    }
    if num_rows:
        programs = min(triton.cdiv(num_rows, ROWS), PROGRAMS)
        _products[(triton.cdiv(num_outputs, OUTPUTS), n * chunks, programs)](
            streams_TE,
            norm.weight,
            packed.down_FE,
            sums,
            num_rows,
            WIDTH=width,
            COLUMNS=columns,
            PARTS=PARTS,
            OUTPUTS=OUTPUTS,
            num_warps=DOWN_WARPS,
            num_stages=1,
            **shared,
        )
        rank2 = max(16, triton.next_power_of_2(rank))
        n2 = triton.next_power_of_2(n)
        of_program = min(PLACES, HELD_BYTES // (rank2 * streams_TE.itemsize)) // n2
        _mix[(triton.cdiv(size, of_program), programs)](
            streams_TE,
            norm.weight,
            sums,
            packed.up_ER,
            mixed_TD,
            factors_Tn,
            norm.eps,
            num_rows,
            N=n,
            N2=n2,
            RANK=rank,
            RANK2=rank2,
            COLUMNS=of_program,
            num_warps=UP_WARPS,
            num_stages=1,
            **shared,
        )
    return mixed_TD, factors_Tn if packed.num_factors else None


def _refusal(problem: Problem) -> str | None:
    if refusal := triton_refusal(problem):
        return refusal
    if not problem.row_invariant:
        return "for decode rows; larger tiles are quicker for the rows of prompts"
    return f"holds rows of W_up, of at most {MAX_RANK} numbers" if problem.k > MAX_RANK else None


register(
    Kernel(
        "gated_mix",
        "triton.tile",
        min_sm=80,
        priority=10,
        supports=_refusal,
        fn=gated_mix,
        repack=gated_matrices,
    )
)
