"""Triton linear of every format of `operands/matrices.py` and of every size, for decode rows and for prompts.

    y = act(gate(x)) * up(x) or W x, rounded to the model's dtype after the bias, plus the residual

It serves what no tuned kernel does: e4m3 weights in blocks of 128 x 128, codes of four bits in groups of 32
or 64 columns or with one scale a channel, I that is no multiple of 128 (gpt-oss has 2,880), heads of an odd
vocabulary. Formats that tuned kernels read, too, are packed as these pack them.

A program owns `bm` outputs of `bn` rows and sums over all of I in an order that depends on no tile
(`matrix_product.py`), so the bits of a decode row depend on that row alone. Decode tiles have at most 32
outputs: Triton then multiplies by one instruction on every GPU, `mma`. From 64 outputs on it takes another
one on Hopper, `wgmma`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.kernels.compilers.triton import (
    interpreted,
    jit,
    launch_dependents,
    pdl_options,
    tl,
    triton_refusal,
    wait,
)
from compress.kernels.linear import dense16, fp8
from compress.kernels.linear.fp8 import PackedFp8
from compress.kernels.linear.launch import ACTIVATIONS
from compress.kernels.operands.activation import activated
from compress.kernels.operands.matrices import FORMATS, TILE, Matrices, MatrixFormat, format_of, pack_matrices
from compress.kernels.operands.matrix_product import e4m3_factors, prefetch, product
from compress.kernels.operands.rows import QuantizedRows
from compress.kernels.problem import DENSE_SCHEMES, Problem
from compress.kernels.select import Kernel, Repack, register
from compress.quant.scheme import SCHEMES, QuantizedWeight

MAX_DECODE_ROWS = 512
MIN_COLUMNS = 16
MIN_NATIVE_COLUMNS = 32
"""Columns of a step on tensor cores that multiply e4m3."""
MIN_PROGRAMS = 256
"""Programs of a decode linear below which its tiles are made smaller."""


@dataclass(frozen=True)
class Blocks:
    """One matrix, and the output rows that share a scale of fp8_block."""

    matrices: Matrices
    scale_rows: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Tile:
    """The outputs, rows and columns of a program's product, its warps, and the stages of its pipeline."""

    bm: int
    bn: int
    bk: int
    num_warps: int
    num_stages: int


def decode_tile(matrices: Matrices, num_rows: int, size: int) -> Tile:
    """Return the tile of decode rows, for `size` outputs."""
    bn = 8 if num_rows <= 8 else 16 if num_rows <= 16 else 32
    programs = -(-size // 32) * -(-num_rows // bn)
    bm = 32 if bn == 32 or programs >= MIN_PROGRAMS else 16
    num_warps = bm // 16 * (1 if bn == 8 else 2)
    return Tile(bm, bn, matrices.step_columns(128), num_warps, 6)


def prefill_tile(matrices: Matrices) -> Tile:
    """Return the tile of the rows of a prompt."""
    if matrices.format == "fp8_block":
        return Tile(64, 128, matrices.step_columns(128), 4, 3)
    return Tile(128, 128, matrices.step_columns(64 if matrices.format == "dense16" else 128), 8, 3)


@jit(varying=("num_rows",))
def _linear(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    w_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    y_ptr: tl.tensor,
    num_rows: tl.tensor,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    BLOCKS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STAGES: tl.constexpr,
    E4M3: tl.constexpr,
    PREFETCH: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Write `BM` outputs of `BN` rows."""
    launch_dependents(PDL)
    GATED: tl.constexpr = ACTIVATION is not None
    SIZE: tl.constexpr = OUT // 2 if GATED else OUT
    if PDL and PREFETCH:
        # Weights are constant: they are on their way to L2 while the kernel ahead ends.
        start = tl.program_id(0) * BM
        prefetch(w_ptr, start, tl.minimum(BM, SIZE - start), BM, IN, FORMAT)
        if GATED:
            prefetch(w_ptr, OUT - SIZE + start, tl.minimum(BM, SIZE - start), BM, IN, FORMAT)
    wait(PDL)
    outputs = tl.program_id(0) * BM + tl.arange(0, BM)
    first = tl.minimum(outputs, SIZE - 1)
    second = OUT - SIZE + first
    tokens = tl.program_id(1) * BN + tl.arange(0, BN)
    valid = tokens < num_rows
    y, up = product(
        x_ptr, x_scale_ptr, tl.minimum(tokens, num_rows - 1), valid, w_ptr, scale_ptr, offset_ptr,
        tl.program_id(0) * 0, first, second, (first // SCALE_ROWS)[:, None], (second // SCALE_ROWS)[:, None],
        OUT, IN, BLOCKS, BM, BN, BK, GROUP, FORMAT, ASYMMETRIC, GATED, STAGES, E4M3, INTERPRETED,
    )  # fmt: skip
    if BIAS:
        y += tl.load(bias_ptr + first).to(tl.float32)[:, None]
    if GATED:
        if BIAS:
            up += tl.load(bias_ptr + second).to(tl.float32)[:, None]
        y = activated(y, ACTIVATION) * up
    at = tokens.to(tl.int64)[None, :] * SIZE + outputs[:, None]
    there = valid[None, :] & (outputs < SIZE)[:, None]
    y = y.to(y_ptr.dtype.element_ty)
    if RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=there, other=0.0)
        y = (residual.to(tl.float32) + y.to(tl.float32)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, y, mask=there)


def linear(
    x: Tensor | QuantizedRows,
    packed: Any,
    bias_O: Tensor | None,
    *,
    activation: str | None,
    decode: bool,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x W^T, [T, O], or [T, O / 2] with an activation."""
    blocks = as_blocks(packed)
    matrices = blocks.matrices
    (num_rows, _) = x.shape
    size = matrices.out_features if activation is None else matrices.out_features // 2
    tile = decode_tile(matrices, num_rows, size) if decode else prefill_tile(matrices)
    device = matrices.data.device
    values = (x.values_TK if isinstance(x, QuantizedRows) else x).contiguous()
    x_scale = x.scale_T.contiguous() if isinstance(x, QuantizedRows) else None
    y_TO = torch.empty(num_rows, size, dtype=out_dtype or blocks.dtype, device=device)
    if num_rows == 0:
        return y_TO
    _linear[-(-size // tile.bm), -(-num_rows // tile.bn)](
        values.view(torch.uint8) if x_scale is not None else values,
        x_scale,
        matrices.data,
        matrices.scale,
        matrices.offset,
        bias_O,
        None if residual_TO is None else residual_TO.contiguous(),
        y_TO,
        num_rows,
        OUT=matrices.out_features,
        IN=matrices.in_features,
        BLOCKS=matrices.scale.shape[1]
        if matrices.format == "fp8_block" and matrices.scale is not None
        else 0,
        SCALE_ROWS=blocks.scale_rows,
        BM=tile.bm,
        BN=tile.bn,
        BK=tile.bk,
        GROUP=matrices.group_size,
        FORMAT=FORMATS.index(matrices.format),
        ASYMMETRIC=matrices.offset is not None,
        BIAS=bias_O is not None,
        RESIDUAL=residual_TO is not None,
        ACTIVATION=activation,
        STAGES=tile.num_stages,
        E4M3=e4m3_factors(device, native=not decode and tile.bk >= MIN_NATIVE_COLUMNS),
        PREFETCH=decode,
        INTERPRETED=interpreted(),
        num_warps=tile.num_warps,
        **pdl_options(device),
    )
    return y_TO


def repack(
    weights: Sequence[Tensor | QuantizedWeight], *, dtype: torch.dtype, device: torch.device, gated: bool
) -> Blocks:
    """Stack weights along O. A scale of fp8_block serves as many rows as lie in one block of every weight."""
    del gated  # gate and up are found by their rows
    matrices = pack_matrices([weights], [[None]], dtype=dtype, device=device)
    if matrices.format != "fp8_block":
        return Blocks(matrices, 1, dtype)
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    scale_rows = TILE if all(weight.shape[0] % TILE == 0 for weight in quantized) else 1
    scale_OG = torch.cat([each.scheme.by_row(each.scale_OG, each.shape[0]) for each in quantized])
    scale = scale_OG[::scale_rows].to(device=device, dtype=torch.float32).contiguous().unsqueeze(0)
    return Blocks(replace(matrices, scale=scale), scale_rows, dtype)


def as_blocks(packed: Any) -> Blocks:
    """Return a weight in the layout of a tuned kernel, or of `repack`, as the product reads it."""
    if isinstance(packed, Blocks):
        return packed
    if isinstance(packed, PackedFp8):
        codes = packed.values.view(torch.uint8)
        return Blocks(
            Matrices("fp8", codes, packed.scale_O, None, None, codes.shape[0], codes.shape[1], 0),
            1,
            packed.dtype,
        )
    return Blocks(
        Matrices("dense16", packed, None, None, None, packed.shape[0], packed.shape[1], 0), 1, packed.dtype
    )


REPACKS: dict[MatrixFormat, Repack] = {
    "dense16": dense16.repack,
    "fp8": fp8.repack,
    "fp8_block": repack,
    "w4": repack,
}


def _format(problem: Problem) -> MatrixFormat | None:
    if problem.scheme == DENSE_SCHEMES[problem.dtype]:
        return "dense16"
    scheme = SCHEMES.get(problem.scheme)
    if scheme is not None and scheme.type == "float" and scheme.activation == "tensor":
        return "fp8"
    return None if scheme is None else format_of(scheme)


def _refusal(problem: Problem, *, given: MatrixFormat, activation: str | None, decode: bool) -> str | None:
    if reason := triton_refusal(problem):
        return reason
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in 16 bits, not in {problem.dtype}"
    if _format(problem) != given:
        return f"for weights in the format {given}"
    if problem.activation != activation:
        return f"its outputs are gated by {activation}" if activation else "its outputs are not gated"
    if decode != problem.row_invariant:
        return "for decode rows" if decode else "a row's bits depend on the number of rows"
    if decode and problem.m_max > MAX_DECODE_ROWS:
        return f"for M up to {MAX_DECODE_ROWS}"
    if problem.k % MIN_COLUMNS:
        return f"K = {problem.k} is no multiple of {MIN_COLUMNS}"
    group_size = SCHEMES[problem.scheme].group_size if problem.scheme in SCHEMES else None
    if group_size is not None and problem.k % group_size:
        return f"K = {problem.k} is no multiple of the group size {group_size}"
    if given == "w4" and problem.n % TILE:
        return f"N = {problem.n} is no multiple of {TILE}"
    return None


def _kernel(given: MatrixFormat, activation: str | None, *, decode: bool) -> Kernel:
    supports: Callable[[Problem], str | None] = partial(
        _refusal, given=given, activation=activation, decode=decode
    )
    parts = ["triton", given, "decode" if decode else "prefill", *([activation] if activation else [])]
    return Kernel(
        "linear",
        ".".join(parts),
        min_sm=80,
        priority=5,
        supports=supports,
        fn=partial(linear, activation=activation, decode=decode),
        repack=REPACKS[given],
    )


for _given in FORMATS:
    register(_kernel(_given, None, decode=False))
    for _activation in ACTIVATIONS:
        register(_kernel(_given, _activation, decode=True))
