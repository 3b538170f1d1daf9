"""Linear of many rows over four-bit weights: the weight is dequantized piece by piece into a scratch that
stays in L2, and cuBLAS multiplies from there.

    y[:, p] = x W[p]^T,   W[p] = round((codes - zero_point) scale) of the output rows p of one piece

Up to some hundred rows, on Hopper, `hopper.cu` dequantizes on the way to the tensor cores instead: the four
linears of a layer of llama-3.1-8b take 342 us over 512 rows (439 us by cuBLAS), 675 us over 1,024 (769 us).

Past about a hundred rows arithmetic is the limit, and cuBLAS is near it (780 TFLOP/s on an H200, 690
sustained), so a weight is written once for all rows. A llama-3.1-8b gate_up (28672 x 4096) over 2,048
rows takes 670 us in bfloat16, 770 us if all is dequantized first, and 710 us in pieces that L2 holds: the
scratch is overwritten before it reaches memory. A short product is not worth dividing (512 rows: 239 us
whole, 251 us in pieces).

The packed blocks are those of `w4a16.py` and `fp4.py`. A gated weight holds gate and up rows in turns: a
piece is then two matrices, one of each.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from compress.kernels.compilers.triton import jit, launch_dependents, pdl_options, tl, triton_refusal, wait
from compress.kernels.linear.fp4 import UNIT
from compress.kernels.linear.hopper import multiply
from compress.kernels.linear.hopper import refusal as hopper_refusal
from compress.kernels.linear.hopper_plan import prompt_plan
from compress.kernels.linear.prefill_dense16 import library_refusal
from compress.kernels.linear.prefill_dense16 import linear as multiply_dense
from compress.kernels.linear.w4a16 import BLOCK, MULTIPLIED, OFFSETS, STREAMED, TILE, PackedW4, repack
from compress.kernels.operands.gpu import gpu_of
from compress.kernels.operands.matrix_product import e2m1_values
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register

SCRATCH_BYTES = 60_000_000
"""Bytes that an H200 keeps in L2 (7168 rows of 4096: 708 us, 8192 rows: 767 us)."""
MIN_PIECE_ROWS = 4096
"""Fewest rows of a piece that fill the GPU: a 4096 x 14336 weight takes 352 us whole and 372 us in halves
that L2 would hold."""
MIN_ROWS_FOR_PIECES = 1024
GROUPS_PER_PROGRAM = 4
MAX_PRODUCT_ROWS = 1024
"""Rows up to which dequantizing once is no quicker than doing so for each block of 128 rows."""


@jit(varying=("first_tile", "num_groups", "half_rows", "size"))
def _dequantize(
    words_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    outer_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first_tile: tl.tensor,
    num_groups: tl.tensor,
    half_rows: tl.tensor,
    size: tl.tensor,
    GROUPS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    SUBGROUPS: tl.constexpr,
    ZERO: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Dequantize `GROUPS` neighbouring blocks of 16 rows x 128 columns. The number is 128 + code + ZERO (+
    offset); offsets follow the scales. With outputs' scales, of which there are `size`, codes are those of
    e2m1, and ZERO is the unit that `fp4.py` defines."""
    launch_dependents(PDL)
    tile = tl.program_id(0)
    rows = tl.arange(0, 16)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    blocks = ((first_tile + tile) * num_groups + groups).to(tl.int64) * BLOCK_WORDS
    mask = groups < num_groups
    words = tl.load(words_ptr + blocks[:, None] + tl.arange(0, 256)[None, :], mask=mask[:, None], other=0)
    row_at = 512 + rows % 8 * (2 * SUBGROUPS) + rows // 8
    group_at = blocks[:, None] * 2 + tl.arange(0, SUBGROUPS)[None, :] * 2
    scale_at = scales_ptr + row_at[:, None, None] + group_at[None, :, :]
    scale = tl.load(scale_at, mask=mask[None, :, None], other=0.0)
    zero = ZERO
    if BLOCK_WORDS > 256 + 8 * SUBGROUPS:
        offset = tl.load(scale_at + 16 * SUBGROUPS, mask=mask[None, :, None], other=0.0)
        zero = (offset.to(tl.float32) + ZERO)[:, :, :, None]
    # Join adds a last axis of two. Code j of half a word: row + 8 if j is odd, column + 8 if it is above one.
    FP4: tl.constexpr = outer_ptr is not None
    F16: tl.constexpr = out_ptr.dtype.element_ty is tl.float16
    even = tl.join(
        tl.join(_code(words, 0, 0, FP4, F16), _code(words, 0, 1, FP4, F16)),
        tl.join(_code(words, 2, 0, FP4, F16), _code(words, 2, 1, FP4, F16)),
    )
    odd = tl.join(
        tl.join(_code(words, 1, 0, FP4, F16), _code(words, 1, 1, FP4, F16)),
        tl.join(_code(words, 3, 0, FP4, F16), _code(words, 3, 1, FP4, F16)),
    )
    numbers = tl.reshape(
        tl.join(even, odd), [GROUPS, 2, 8, 4, 4, 2, 2, 2]
    )  # group, half, row, t, step, column + 1, column + 8, row + 8
    numbers = tl.permute(numbers, [7, 2, 0, 1, 4, 6, 3, 5])
    numbers = tl.reshape(numbers, [16, GROUPS, SUBGROUPS, 128 // SUBGROUPS])
    factor = scale.to(tl.float32)
    if FP4:
        exact = e2m1_values(numbers)
        first = (first_tile + tile) * (8 if GATED else 16)
        row = (rows // 8 * (size // 2) + rows % 8 if GATED else rows) + first
        outer = tl.load(outer_ptr + row, mask=row < size, other=0.0)
        factor = factor * ZERO * outer[:, None, None]
    else:
        exact = (numbers | 0x4300).to(tl.uint16).to(tl.bfloat16, bitcast=True).to(tl.float32) + zero
    value = tl.reshape(exact * factor[:, :, :, None], [16, GROUPS, 128])
    wait(PDL)
    out_rows = (rows // 8 * half_rows + tile * 8 + rows % 8) if GATED else tile * 16 + rows
    at = (out_rows.to(tl.int64) * num_groups)[:, None] + groups[None, :]
    tl.store(
        out_ptr + at[:, :, None] * 128 + tl.arange(0, 128)[None, None, :],
        value.to(scale.dtype),
        mask=mask[None, :, None],
    )


@jit()
def _code(
    words: tl.tensor, J: tl.constexpr, HALF: tl.constexpr, FP4: tl.constexpr, F16: tl.constexpr
) -> tl.tensor:
    """Return code J of half a word, as `w4a16.py` or `fp4.py` lays it out."""
    if FP4:
        MAGNITUDE: tl.constexpr = 16 * HALF + (9 - 3 * J if F16 else (18 - 3 * J) % 12)
        SIGN: tl.constexpr = 16 * HALF + (15 if J == 0 else 11 + J)
        return (words >> MAGNITUDE) & 7 | ((words >> SIGN) & 1) << 3
    else:
        return (words >> (16 * HALF + 4 * J)) & 0xF


def linear(
    x_TI: Tensor,
    packed: PackedW4,
    bias_O: Tensor | None,
    *,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x W^T, [T, O], gate before up."""
    num_rows = x_TI.shape[0]
    gpu = gpu_of(x_TI.device)
    if gpu.sm == 90 and num_rows <= MAX_PRODUCT_ROWS and packed.n % (2 * TILE if packed.gated else TILE) == 0:
        weight = packed.kernel_weight
        chosen = prompt_plan(weight.shape(gated=packed.gated), num_rows, gpu)
        return multiply(
            x_TI,
            weight,
            bias_O,
            dtype=packed.dtype,
            activation=None,
            residual_TO=residual_TO,
            out_dtype=out_dtype,
            chosen=chosen,
        )
    if num_rows < MIN_ROWS_FOR_PIECES or piece_tiles(packed) == packed.blocks.shape[0]:
        w_OI = dequantize(packed, 0, packed.blocks.shape[0]).flatten(0, 1)
        return multiply_dense(x_TI, w_OI, bias_O, residual_TO=residual_TO, out_dtype=out_dtype)
    halves = 2 if packed.gated else 1
    out_dtype = x_TI.dtype if out_dtype is None else out_dtype
    y_THP = torch.empty(num_rows, halves, packed.n // halves, dtype=out_dtype, device=x_TI.device)
    for start, w_HPK in pieces(packed):
        _multiply(x_TI, w_HPK, y_THP[:, :, start : start + w_HPK.shape[1]].transpose(0, 1))
    y_TO = y_THP.view(num_rows, packed.n)
    y_TO = y_TO if bias_O is None else y_TO.add_(bias_O)
    return y_TO if residual_TO is None else y_TO.add_(residual_TO)


def _multiply(x_TI: Tensor, w_HPK: Tensor, out_HTP: Tensor) -> None:
    dtype = {} if out_HTP.dtype == x_TI.dtype else {"out_dtype": out_HTP.dtype}
    if w_HPK.shape[0] == 1:
        torch.mm(x_TI, w_HPK[0].t(), out=out_HTP[0], **dtype)
    else:
        torch.bmm(x_TI.expand(w_HPK.shape[0], -1, -1), w_HPK.transpose(1, 2), out=out_HTP, **dtype)


def piece_tiles(packed: PackedW4) -> int:
    """Return the row tiles of one piece; pieces are of about one size."""
    most = max(SCRATCH_BYTES // (2 * packed.k), MIN_PIECE_ROWS) // TILE
    num_tiles = packed.blocks.shape[0]
    return -(-num_tiles // -(-num_tiles // most))


def pieces(packed: PackedW4) -> Iterator[tuple[int, Tensor]]:
    """Yield the first row of each piece (of a gated weight: within either half) and its weight as
    `dequantize` gives it. Pieces share memory: a piece is valid until the next one is taken."""
    num_tiles = packed.blocks.shape[0]
    step = piece_tiles(packed)
    tile_rows = TILE // 2 if packed.gated else TILE
    scratch = None
    for first_tile in range(0, num_tiles, step):
        w_HPK = dequantize(packed, first_tile, min(step, num_tiles - first_tile), scratch)
        scratch = w_HPK if scratch is None else scratch
        yield first_tile * tile_rows, w_HPK


def dequantize(packed: PackedW4, first_tile: int, num_tiles: int, scratch: Tensor | None = None) -> Tensor:
    """Return the rows of these tiles: [1, P, K], or gate and up rows of a gated weight, [2, P, K]. They are
    written to `scratch` if it is given, which must have at least as many rows."""
    halves = 2 if packed.gated else 1
    tile_rows = TILE // halves
    half_size = packed.n // halves
    if scratch is None:
        scratch = torch.empty(
            halves, num_tiles * tile_rows, packed.k, dtype=packed.dtype, device=packed.blocks.device
        )
    num_groups, block_bytes = packed.blocks.shape[1:]
    zero = -136.0 if packed.symmetric else OFFSETS[packed.dtype] - 128.0
    _dequantize[num_tiles, -(-num_groups // GROUPS_PER_PROGRAM)](
        packed.blocks.view(torch.int32),
        packed.blocks.view(packed.dtype),
        packed.outer_O,
        scratch,
        first_tile,
        num_groups,
        scratch.stride(0) // packed.k,
        packed.n,
        GROUPS=GROUPS_PER_PROGRAM,
        BLOCK_WORDS=block_bytes // 4,
        SUBGROUPS=packed.subgroups,
        ZERO=zero if packed.outer_O is None else 2.0 ** UNIT[packed.dtype],
        GATED=packed.gated,
        num_warps=4,
        **pdl_options(scratch.device),
    )
    return scratch[:, : min(num_tiles * tile_rows, half_size - first_tile * tile_rows)]


def refusal(problem: Problem) -> str | None:
    if problem.scheme not in MULTIPLIED:
        return f"for {', '.join(MULTIPLIED)}"
    if problem.scheme not in STREAMED and (reason := hopper_refusal(problem)):
        return reason  # decode rows have the other layout then, and one serves both
    return refuse_size(problem)


def refuse_size(problem: Problem) -> str | None:
    """Refuse what no four-bit weight is multiplied with here."""
    if problem.dtype not in OFFSETS:
        return f"computes in 16 bits, not in {problem.dtype}"
    if problem.k % BLOCK:
        return f"K = {problem.k} is not a multiple of {BLOCK}"
    return library_refusal(problem) or triton_refusal(problem)


register(
    Kernel(
        "linear",
        "w4a16.dequantize",
        min_sm=80,
        priority=10,
        supports=refusal,
        fn=linear,
        repack=repack,
    )
)
