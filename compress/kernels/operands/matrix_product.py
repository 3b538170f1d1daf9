"""The product of rows with outputs of one matrix, for every format of `matrices.py`.

Weights are the left factor of every product and tokens its columns, so that a unit of few tokens wastes
little. A sum over I runs in steps of 16 columns in their order, whatever the sizes of a tile; integer codes
of four bits and e4m3 codes with a scale for each block sum 128 columns (or a smaller scale group) from zero,
and add the scaled sum in float32; sums of int8 are whole numbers of 32 bits. Numbers of e2m1 are multiplied
by their scales first, exactly, and int8 codes of 16-bit rows are numbers of 16 bits exactly; both sum all of
I. So no tile size changes a bit.

`E4M3` states how e4m3 codes are multiplied: "native" on Hopper's FP8 tensor cores, which keep 14 bits of a
sum of 128 terms, for prompts; otherwise exactly, widened to float16 by the GPU's instruction ("converted"),
or in integer arithmetic where it has none ("bits").
"""

from dataclasses import dataclass

import torch

from compress.kernels.compilers.triton import FP8_SM, interpreted, jit, tl, triton
from compress.kernels.operands.e4m3 import e4m3_float16
from compress.kernels.problem import compute_capability


def e4m3_factors(device: torch.device, *, native: bool) -> str:
    """Return how a device multiplies e4m3 codes; `native` allows it to do so as they are."""
    sm = compute_capability(device)
    if native and sm == 90 and not interpreted():
        return "native"
    return "converted" if sm >= FP8_SM else "bits"


MIN_NATIVE_COLUMNS = 32
"""Columns of a step on tensor cores that multiply e4m3."""


@dataclass(frozen=True)
class Tile:
    """The outputs, rows and columns of a program's product, its warps, and the stages of its pipeline."""

    bm: int
    bn: int
    bk: int
    num_warps: int
    num_stages: int


@jit()
def _numbers(
    words: tl.tensor, offset: tl.tensor, SHIFT: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr
) -> tl.tensor:
    """Return code - zero point of one nibble of int16 words, as bfloat16 or float16; `offset` is bfloat16
    - 136 - zero point, or float16 - 1032 - zero point."""
    if INTERPRETED:
        # The interpreter's products of bfloat16 are wrong; those of float32 are exact.
        base = 128.0 if DTYPE is tl.bfloat16 else 1024.0
        return ((words >> SHIFT) & 0xF).to(tl.float32) + base + offset.to(tl.float32)
    elif DTYPE is tl.bfloat16:
        if SHIFT == 0:
            return tl.inline_asm_elementwise(
                "{.reg .b32 t, one; mov.b32 one, 0x3F803F80; "
                "lop3.b32 t, $1, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, t, one, $2;}",
                "=r,r,r", [words, offset], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        elif SHIFT == 4:
            return tl.inline_asm_elementwise(
                "{.reg .b32 t, one; mov.b32 one, 0x3F803F80; shr.b32 t, $1, 4; "
                "lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, t, one, $2;}",
                "=r,r,r", [words, offset], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        elif SHIFT == 8:
            return tl.inline_asm_elementwise(
                "{.reg .b32 t, one; mov.b32 one, 0x3F803F80; shr.b32 t, $1, 8; "
                "lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, t, one, $2;}",
                "=r,r,r", [words, offset], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                "{.reg .b32 t, one; mov.b32 one, 0x3F803F80; shr.b32 t, $1, 12; "
                "lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, t, one, $2;}",
                "=r,r,r", [words, offset], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
    else:
        bits = ((words >> SHIFT) & 0xF | 0x6400).to(tl.int16)
        return bits.to(tl.float16, bitcast=True) + offset


@jit()
def e2m1_values(nibbles: tl.tensor) -> tl.tensor:
    """Return the numbers of e2m1 that the low four bits of integers encode, float32."""
    index = nibbles & 7
    power = tl.where(index > 5, 4.0, tl.where(index > 3, 2.0, 1.0))  # a GPU's exp2 need not be exact
    size = power * (tl.where(index > 1, 1.0, 0.0) + (index & 1).to(tl.float32) * 0.5)
    return tl.where((nibbles & 8) != 0, -size, size)


@jit()
def _floats(
    words: tl.tensor, scale: tl.tensor, SHIFT: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr
) -> tl.tensor:
    """Return a number of e2m1, one nibble of int16 words, times a scale, exactly. As bits of the exponent and
    the mantissa of bfloat16 (float16) it is 2^-126 (2^-14) of itself."""
    if INTERPRETED:
        return e2m1_values(words >> SHIFT) * scale.to(tl.float32)
    elif DTYPE is tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{.reg .b32 t, sign, factor, none; mov.b32 factor, 0x7E807E80; mov.b32 none, 0x80008000; "
            "shl.b32 sign, $1, 12; and.b32 sign, sign, 0x80008000; and.b32 t, $1, 0x00070007; "
            "shl.b32 t, t, 6; or.b32 t, t, sign; "
            "fma.rn.bf16x2 t, t, factor, none; fma.rn.bf16x2 $0, t, $2, none;}",
            "=r,r,r", [(words >> SHIFT).to(tl.int16), scale], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        nibble = words >> SHIFT
        bits = (((nibble & 7) << 9) | ((nibble & 8) << 12)).to(tl.int16)
        return bits.to(tl.float16, bitcast=True) * 16384.0 * scale


@jit()
def _factors(
    tile: tl.tensor, FORMAT: tl.constexpr, E4M3: tl.constexpr, INTERPRETED: tl.constexpr
) -> tl.tensor:
    """Return numbers to multiply: as loaded (of format 5 rows alone), or e4m3 codes widened to float16."""
    if INTERPRETED:
        return e4m3_float16(tile).to(tl.float32) if FORMAT == 2 or FORMAT == 3 else tile.to(tl.float32)
    elif FORMAT < 2 or FORMAT == 5:
        return tile
    elif E4M3 == "native":
        return tile.to(tl.float8e4nv, bitcast=True)
    elif E4M3 == "converted":
        return tile.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        return e4m3_float16(tile)


@jit()
def _rows(
    x_at: tl.tensor,
    block: tl.tensor,
    i: tl.constexpr,
    words: tl.tensor,
    there: tl.tensor,
    IN: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> tl.tensor:
    """Return quarter i of the columns of a block of 128, transposed, and zeros past the end of I, where codes
    are zero, too."""
    if IN % 128 != 0:
        there = there & (words < IN - block * 128 - i * 32)[None, :]
    x = tl.load(x_at + block * 128 + i * 32, mask=there, other=0.0)
    return tl.trans(x.to(tl.float32) if INTERPRETED else x)


@jit()
def prefetch(
    w_ptr: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    MOST: tl.constexpr,
    IN: tl.constexpr,
) -> None:
    """Bring `count` outputs of e4m3 from output `first` on, at most `MOST`, to L2."""
    bytes = tl.arange(0, triton.next_power_of_2((MOST * IN + 127) // 128)) * 128
    at = w_ptr + first.to(tl.int64) * IN + tl.where(bytes < count * IN, bytes, 0)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit()
def product(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    x_rows: tl.tensor,
    valid: tl.tensor,
    w_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    outer_ptr: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    first_block: tl.tensor,
    second_block: tl.tensor,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    BLOCKS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    TWO: tl.constexpr,
    STAGES: tl.constexpr,
    E4M3: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> tl.tensor:
    """Return two products [BM, BN] of an expert's outputs `first` and `second` (one, twice, if not TWO) with
    rows of x. The blocks of fp8_block are one for the tile, or one for each of its outputs [BM, 1]."""
    expert = expert.to(tl.int64)
    a = tl.zeros([BM, BN], dtype=tl.float32)
    b = tl.zeros([BM, BN], dtype=tl.float32)
    x_at = x_ptr + x_rows.to(tl.int64)[:, None] * IN
    there = valid[:, None]
    if FORMAT == 1 or FORMAT == 6:
        DTYPE: tl.constexpr = x_ptr.dtype.element_ty
        ZERO: tl.constexpr = -136.0 if DTYPE is tl.bfloat16 else -1032.0
        COLUMNS: tl.constexpr = (IN + 127) // 128 * 128
        SCALES: tl.constexpr = COLUMNS // GROUP
        words = tl.arange(0, 32)
        x_at += words[None, :]
        w_ptr += expert * (OUT * COLUMNS // 4)
        row_words = COLUMNS * 4
        a_at = w_ptr + ((first // 16) * row_words + first % 16 * 32)[:, None] + words[None, :]
        b_at = w_ptr + ((second // 16) * row_words + second % 16 * 32)[:, None] + words[None, :]
        a_first = expert * (OUT * SCALES) + (first // 16) * (SCALES * 16) + first % 16
        b_first = expert * (OUT * SCALES) + (second // 16) * (SCALES * 16) + second % 16
        if FORMAT == 6:
            for block in tl.range(0, COLUMNS // 128, num_stages=STAGES):
                a_words = tl.load(a_at + block * 512)
                b_words = a_words
                if TWO:
                    b_words = tl.load(b_at + block * 512)
                for i in tl.static_range(4):
                    x = _rows(x_at, block, i, words, there, IN, INTERPRETED)
                    group = ((block * 128 + i * 32 + words) // GROUP * 16)[None, :]
                    a_scale = tl.load(scale_ptr + a_first[:, None] + group)
                    a = tl.dot(_floats(a_words, a_scale, 4 * i, DTYPE, INTERPRETED), x, a)
                    if TWO:
                        b_scale = tl.load(scale_ptr + b_first[:, None] + group)
                        b = tl.dot(_floats(b_words, b_scale, 4 * i, DTYPE, INTERPRETED), x, b)
            if outer_ptr is not None:
                outer_ptr += expert * OUT
                a *= tl.load(outer_ptr + first)[:, None]
                if TWO:
                    b *= tl.load(outer_ptr + second)[:, None]
        else:
            # A step is one or two blocks of 128 columns (BK), whose scales are loaded a step ahead: Triton
            # pipelines only what a product reads.
            PER_STEP: tl.constexpr = BK // 128
            LAST: tl.constexpr = COLUMNS // 128 - 1
            a_scale = tl.load(scale_ptr + a_first)
            a_scale1 = tl.load(scale_ptr + a_first + (PER_STEP - 1) * 128 // GROUP * 16)
            b_scale = a_scale
            b_scale1 = a_scale1
            if TWO:
                b_scale = tl.load(scale_ptr + b_first)
                b_scale1 = tl.load(scale_ptr + b_first + (PER_STEP - 1) * 128 // GROUP * 16)
            for step in tl.range(0, COLUMNS // 128, PER_STEP, num_stages=STAGES):
                ahead = tl.minimum(step + PER_STEP, LAST) * 128 // GROUP * 16
                ahead1 = tl.minimum(step + 2 * PER_STEP - 1, LAST) * 128 // GROUP * 16
                a_next = tl.load(scale_ptr + a_first + ahead)
                a_next1 = tl.load(scale_ptr + a_first + ahead1)
                b_next = a_next
                b_next1 = a_next1
                if TWO:
                    b_next = tl.load(scale_ptr + b_first + ahead)
                    b_next1 = tl.load(scale_ptr + b_first + ahead1)
                for part in tl.static_range(PER_STEP):
                    block = step + part
                    a_words = tl.load(a_at + block * 512)
                    b_words = a_words
                    if TWO:
                        b_words = tl.load(b_at + block * 512)
                    a_sum = tl.zeros([BM, BN], dtype=tl.float32)
                    b_sum = tl.zeros([BM, BN], dtype=tl.float32)
                    for i in tl.static_range(4):
                        x = _rows(x_at, block, i, words, there, IN, INTERPRETED)
                        group = (block * 128 + i * 32) // GROUP * 16
                        if ASYMMETRIC:
                            a_offset = tl.load(offset_ptr + a_first + group)[:, None].broadcast_to([BM, 32])
                            b_offset = tl.load(offset_ptr + b_first + group)[:, None].broadcast_to([BM, 32])
                        else:
                            a_offset = tl.full([BM, 32], ZERO, dtype=tl.float32).to(DTYPE)
                            b_offset = a_offset
                        a_sum = tl.dot(_numbers(a_words, a_offset, 4 * i, DTYPE, INTERPRETED), x, a_sum)
                        if TWO:
                            b_sum = tl.dot(_numbers(b_words, b_offset, 4 * i, DTYPE, INTERPRETED), x, b_sum)
                        if GROUP < 128 and (i + 1) * 32 % GROUP == 0:
                            a += a_sum * tl.load(scale_ptr + a_first + group).to(tl.float32)[:, None]
                            a_sum = tl.zeros([BM, BN], dtype=tl.float32)
                            if TWO:
                                b += b_sum * tl.load(scale_ptr + b_first + group).to(tl.float32)[:, None]
                                b_sum = tl.zeros([BM, BN], dtype=tl.float32)
                    if GROUP >= 128:
                        a += a_sum * (a_scale if part == 0 else a_scale1).to(tl.float32)[:, None]
                        if TWO:
                            b += b_sum * (b_scale if part == 0 else b_scale1).to(tl.float32)[:, None]
                a_scale = a_next
                b_scale = b_next
                a_scale1 = a_next1
                b_scale1 = b_next1
    else:
        columns = tl.arange(0, BK)
        x_at += columns[None, :]
        w_ptr += expert * (OUT * IN)
        a_at = w_ptr + (first * IN)[:, None] + columns[None, :]
        b_at = w_ptr + (second * IN)[:, None] + columns[None, :]
        if FORMAT == 3:
            STEPS: tl.constexpr = IN // 128
            scale_ptr += expert * (BLOCKS * STEPS)
            a_scale_at = scale_ptr + first_block * STEPS
            b_scale_at = scale_ptr + second_block * STEPS
            a_scale = tl.load(a_scale_at)
            b_scale = tl.load(b_scale_at)
            x_scale_at = x_scale_ptr + x_rows.to(tl.int64) * STEPS
            x_scale = tl.load(x_scale_at, mask=valid, other=0.0)
            for step in tl.range(0, STEPS, num_stages=STAGES):
                after = tl.minimum(step + 1, STEPS - 1)
                x_next = tl.load(x_scale_at + after, mask=valid, other=0.0)
                a_next = tl.load(a_scale_at + after)
                b_next = tl.load(b_scale_at + after)
                at = step * 128
                x = tl.trans(_factors(tl.load(x_at + at, mask=there, other=0), FORMAT, E4M3, INTERPRETED))
                zero = tl.zeros([BM, BN], dtype=tl.float32)
                a_sum = tl.dot(_factors(tl.load(a_at + at), FORMAT, E4M3, INTERPRETED), x, zero)
                a += a_sum * x_scale[None, :] * a_scale
                if TWO:
                    b_sum = tl.dot(_factors(tl.load(b_at + at), FORMAT, E4M3, INTERPRETED), x, zero)
                    b += b_sum * x_scale[None, :] * b_scale
                x_scale = x_next
                a_scale = a_next
                b_scale = b_next
        elif FORMAT == 4:
            a_sum = tl.zeros([BM, BN], dtype=tl.int32)
            b_sum = tl.zeros([BM, BN], dtype=tl.int32)
            for at in tl.range(0, IN, BK, num_stages=STAGES):
                inside = (columns < IN - at)[None, :]
                x = tl.trans(tl.load(x_at + at, mask=there & inside, other=0))
                a_sum = tl.dot(tl.load(a_at + at, mask=inside, other=0), x, a_sum, out_dtype=tl.int32)
                if TWO:
                    b_sum = tl.dot(tl.load(b_at + at, mask=inside, other=0), x, b_sum, out_dtype=tl.int32)
            scale_ptr += expert * OUT
            x_scale = tl.load(x_scale_ptr + x_rows, mask=valid, other=0.0)
            a = a_sum.to(tl.float32) * x_scale[None, :] * tl.load(scale_ptr + first)[:, None]
            if TWO:
                b = b_sum.to(tl.float32) * x_scale[None, :] * tl.load(scale_ptr + second)[:, None]
        else:
            for at in tl.range(0, IN, BK, num_stages=STAGES):
                x = tl.trans(_factors(tl.load(x_at + at, mask=there, other=0), FORMAT, E4M3, INTERPRETED))
                left = _factors(tl.load(a_at + at), FORMAT, E4M3, INTERPRETED)
                if FORMAT == 5:
                    left = left.to(x.dtype)
                a = tl.dot(left, x, a, max_num_imprecise_acc=BK if E4M3 == "native" else None)
                if TWO:
                    right = _factors(tl.load(b_at + at), FORMAT, E4M3, INTERPRETED)
                    if FORMAT == 5:
                        right = right.to(x.dtype)
                    b = tl.dot(right, x, b, max_num_imprecise_acc=BK if E4M3 == "native" else None)
            if FORMAT == 2:
                scale_ptr += expert * OUT
                x_scale = tl.load(x_scale_ptr + x_rows, mask=valid, other=0.0)
                a = a * x_scale[None, :] * tl.load(scale_ptr + first)[:, None]
                if TWO:
                    b = b * x_scale[None, :] * tl.load(scale_ptr + second)[:, None]
            elif FORMAT == 5:
                scale_ptr += expert * OUT
                a *= tl.load(scale_ptr + first)[:, None]
                if TWO:
                    b *= tl.load(scale_ptr + second)[:, None]
    return a, b
