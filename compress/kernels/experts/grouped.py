"""Grouped products of experts: gate and up with their activation, then down, over the rows of each expert.

    h[p] = act(gate_e x[t]) * (up_e x[t])        p = t K + k, e = ids[t, k]
    y[p] = down_e h[p]
    out[t] = residual[t] + round(sum_k weights[t, k] y[t, k])

A program owns `BM` outputs of one unit (`units.py`), and reads the rows of its weights once. Weights are the
left factor of every product and tokens its columns, so that a unit of few tokens wastes little. A sum over I
runs in steps of 16 columns in their order, whatever the sizes of a tile; codes of four bits and e4m3 codes
with a scale for each block sum 128 columns (or a smaller scale group) from zero, and add the scaled sum in
float32. So no tile size changes a bit, and a decode row has the same bits in any company. Sums over K run in
its order: y is kept in float32 (of a prompt in the model's dtype), and the program of an output tile that
arrives last, or a launch of its own for more rows, adds.

e4m3 codes are widened to float16, exactly, before they are multiplied. `NATIVE` multiplies them on Hopper's
FP8 tensor cores, which keep 14 bits of a sum of 128 terms, for prompts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.compilers.triton import (
    interpreted,
    jit,
    launch_dependents,
    pdl_options,
    tl,
    triton,
    wait,
)
from compress.kernels.experts.packed import FORMATS, ExpertMatrices, PackedExperts
from compress.kernels.experts.units import Units, load_unit, sort_pairs
from compress.kernels.operands.e4m3 import e4m3_values
from compress.kernels.operands.rows import FP8, ActivationQuant, QuantizedRows
from compress.kernels.problem import compute_capability
from compress.kernels.quantize_rows.fused import quantize_rows
from compress.kernels.quantize_rows.groups import quantize_groups


@dataclass(frozen=True)
class Tile:
    """The outputs, tokens and columns of a program's product, its warps, and the stages of its pipeline."""

    bm: int
    bn: int
    bk: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Plan:
    """How experts run: the tiles of both products, whether pairs are sorted (else each is a unit), whether
    the last program of an output tile combines, and the dtype of y.

    `native_fp8` multiplies e4m3 codes as they are. `prefetch` fetches weights of down while gate_up runs,
    where units are pairs.
    """

    gate_up: Tile
    down: Tile
    sort: bool
    combine: bool
    y_dtype: torch.dtype
    native_fp8: bool = False
    prefetch: bool = False


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
def _factors(
    tile: tl.tensor, FORMAT: tl.constexpr, NATIVE: tl.constexpr, INTERPRETED: tl.constexpr
) -> tl.tensor:
    """Return numbers to multiply: as loaded, or e4m3 codes widened to float16."""
    if INTERPRETED:
        return e4m3_values(tile) if FORMAT >= 2 else tile.to(tl.float32)
    elif FORMAT < 2:
        return tile
    elif NATIVE:
        return tile.to(tl.float8e4nv, bitcast=True)
    else:
        return tile.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@jit()
def _product(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    x_rows: tl.tensor,
    valid: tl.tensor,
    w_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    offset_ptr: tl.tensor,
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
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> tl.tensor:
    """Return two products [BM, BN] of an expert's outputs `first` and `second` (one, twice, if not TWO) with
    rows of x."""
    expert = expert.to(tl.int64)
    a = tl.zeros([BM, BN], dtype=tl.float32)
    b = tl.zeros([BM, BN], dtype=tl.float32)
    x_at = x_ptr + x_rows.to(tl.int64)[:, None] * IN
    there = valid[:, None]
    if FORMAT == 1:
        DTYPE: tl.constexpr = x_ptr.dtype.element_ty
        ZERO: tl.constexpr = -136.0 if DTYPE is tl.bfloat16 else -1032.0
        SCALES: tl.constexpr = IN // GROUP
        words = tl.arange(0, 32)
        x_at += words[None, :]
        w_ptr += expert * (OUT * IN // 4)
        row_words = (IN // 128) * 512
        a_at = w_ptr + ((first // 16) * row_words + first % 16 * 32)[:, None] + words[None, :]
        b_at = w_ptr + ((second // 16) * row_words + second % 16 * 32)[:, None] + words[None, :]
        a_first = expert * (OUT * SCALES) + (first // 16) * (SCALES * 16) + first % 16
        b_first = expert * (OUT * SCALES) + (second // 16) * (SCALES * 16) + second % 16
        # A step is one or two blocks of 128 columns (BK), whose scales are loaded a step ahead: Triton
        # pipelines only what a product reads.
        PER_STEP: tl.constexpr = BK // 128
        LAST: tl.constexpr = IN // 128 - 1
        a_scale = tl.load(scale_ptr + a_first)
        a_scale1 = tl.load(scale_ptr + a_first + (PER_STEP - 1) * 128 // GROUP * 16)
        b_scale = a_scale
        b_scale1 = a_scale1
        if TWO:
            b_scale = tl.load(scale_ptr + b_first)
            b_scale1 = tl.load(scale_ptr + b_first + (PER_STEP - 1) * 128 // GROUP * 16)
        for step in tl.range(0, IN // 128, PER_STEP, num_stages=STAGES):
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
                    x = tl.load(x_at + block * 128 + i * 32, mask=there, other=0.0)
                    x = tl.trans(x.to(tl.float32) if INTERPRETED else x)
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
                x = tl.trans(_factors(tl.load(x_at + at, mask=there, other=0), FORMAT, NATIVE, INTERPRETED))
                zero = tl.zeros([BM, BN], dtype=tl.float32)
                a_sum = tl.dot(_factors(tl.load(a_at + at), FORMAT, NATIVE, INTERPRETED), x, zero)
                a += a_sum * x_scale[None, :] * a_scale
                if TWO:
                    b_sum = tl.dot(_factors(tl.load(b_at + at), FORMAT, NATIVE, INTERPRETED), x, zero)
                    b += b_sum * x_scale[None, :] * b_scale
                x_scale = x_next
                a_scale = a_next
                b_scale = b_next
        else:
            for at in tl.range(0, IN, BK, num_stages=STAGES):
                x = tl.trans(_factors(tl.load(x_at + at, mask=there, other=0), FORMAT, NATIVE, INTERPRETED))
                left = _factors(tl.load(a_at + at), FORMAT, NATIVE, INTERPRETED)
                a = tl.dot(left, x, a, max_num_imprecise_acc=BK if NATIVE else None)
                if TWO:
                    right = _factors(tl.load(b_at + at), FORMAT, NATIVE, INTERPRETED)
                    b = tl.dot(right, x, b, max_num_imprecise_acc=BK if NATIVE else None)
            if FORMAT == 2:
                scale_ptr += expert * OUT
                x_scale = tl.load(x_scale_ptr + x_rows, mask=valid, other=0.0)
                a = a * x_scale[None, :] * tl.load(scale_ptr + first)[:, None]
                if TWO:
                    b = b * x_scale[None, :] * tl.load(scale_ptr + second)[:, None]
    return a, b


@jit()
def _activated(gate: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    if ACTIVATION == "silu":
        return gate / (1 + tl.exp(-gate)) * up
    elif ACTIVATION == "gelu":
        return gate * 0.5 * (1 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "gelu_pytorch_tanh":
        return gate / (1 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up
    else:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate / (1 + tl.exp(-1.702 * gate)) * (up + 1)


@jit()
def _prefetch(at: tl.tensor, count: tl.tensor, MOST: tl.constexpr, LINE: tl.constexpr) -> None:
    """Bring `count` items, in lines of `LINE`, to L2."""
    LINES: tl.constexpr = triton.next_power_of_2((MOST + LINE - 1) // LINE)
    items = tl.arange(0, LINES) * LINE
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l", [at + tl.where(items < count, items, 0)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit()
def _gate_up(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    w_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    h_ptr: tl.tensor,
    K: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    BLOCKS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PAIRED: tl.constexpr,
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if not PREFETCH:
        launch_dependents(PDL)
    wait(PDL)
    if PREFETCH:  # `_down` may then read what was written before this kernel
        launch_dependents(PDL)
    expert, pairs, valid = load_unit(experts_ptr, pairs_ptr, BN, PAIRED)
    if expert >= 0:
        start = tl.program_id(0) * BM
        outputs = start + tl.arange(0, BM)
        rows = tl.minimum(outputs, F - 1)
        gate, up = _product(
            x_ptr, x_scale_ptr, pairs // K, valid, w_ptr, scale_ptr, offset_ptr, expert, rows, F + rows,
            start // 128, BLOCKS // 2 + start // 128,
            2 * F, D, BLOCKS, BM, BN, BK, GROUP, FORMAT, ASYMMETRIC, True, STAGES, NATIVE, INTERPRETED,
        )  # fmt: skip
        if BIAS:
            gate += tl.load(bias_ptr + expert * (2 * F) + rows).to(tl.float32)[:, None]
            up += tl.load(bias_ptr + expert * (2 * F) + F + rows).to(tl.float32)[:, None]
        h = _activated(gate, up, ACTIVATION).to(h_ptr.dtype.element_ty)
        at = h_ptr + pairs.to(tl.int64)[None, :] * F + outputs[:, None]
        tl.store(at, h, mask=valid[None, :] & (outputs < F)[:, None])


@jit(varying=("num_pairs",))
def _down(
    h_ptr: tl.tensor,
    h_scale_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    w_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    num_pairs: tl.tensor,
    K: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    BLOCKS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    COMBINE: tl.constexpr,
    PAIRED: tl.constexpr,
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    start = tl.program_id(0) * BM
    outputs = start + tl.arange(0, BM)
    if PDL and PREFETCH:
        # The ids were there before gate_up ran; weights are on their way to L2 while it ends.
        ahead = tl.load(experts_ptr + tl.program_id(1), cache_modifier=".cg")
        ahead = tl.minimum(tl.maximum(ahead, 0), E - 1).to(tl.int64)
        ITEMS: tl.constexpr = F // 4 if FORMAT == 1 else F
        LINE: tl.constexpr = 128 if FORMAT >= 2 else 64
        _prefetch(w_ptr + (ahead * D + start) * ITEMS, tl.minimum(BM, D - start) * ITEMS, BM * ITEMS, LINE)
    wait(PDL)
    expert, pairs, valid = load_unit(experts_ptr, pairs_ptr, BN, PAIRED)
    if expert >= 0:
        rows = tl.minimum(outputs, D - 1)
        y, _ = _product(
            h_ptr, h_scale_ptr, pairs, valid, w_ptr, scale_ptr, offset_ptr, expert, rows, rows,
            start // 128, start // 128,
            D, F, BLOCKS, BM, BN, BK, GROUP, FORMAT, ASYMMETRIC, False, STAGES, NATIVE, INTERPRETED,
        )  # fmt: skip
        if BIAS:
            y += tl.load(bias_ptr + expert * D + rows).to(tl.float32)[:, None]
        at = y_ptr + pairs.to(tl.int64)[None, :] * D + outputs[:, None]
        tl.store(at, y.to(y_ptr.dtype.element_ty), mask=valid[None, :] & (outputs < D)[:, None])
    if COMBINE:
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + tl.program_id(0), 1, sem="acq_rel")
        if arrived == tl.num_programs(1) - 1:
            tl.store(arrivals_ptr + tl.program_id(0), 0)
            tl.debug_barrier()
            zero = tl.full([], 0, dtype=tl.int64)
            for token in range(num_pairs // K):
                _combine_row(y_ptr, weights_ptr, residual_ptr, out_ptr, zero + token, outputs, D, K, RESIDUAL)


@jit()
def _combine_row(
    y_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    token: tl.tensor,
    outputs: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    RESIDUAL: tl.constexpr,
) -> None:
    """Write `outputs` of one token."""
    there = outputs < D
    total = tl.zeros_like(outputs).to(tl.float32)
    for k in tl.static_range(K):
        pair = token * K + k
        at = y_ptr + pair * D + outputs
        y = tl.load(at, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
        weight = tl.load(weights_ptr + pair)
        total = tl.fma(y, tl.zeros_like(y) + weight, total)
    dtype = out_ptr.dtype.element_ty
    out = total.to(dtype)
    if RESIDUAL:
        residual = tl.load(residual_ptr + token * D + outputs, mask=there, other=0.0)
        out = (residual.to(tl.float32) + out.to(tl.float32)).to(dtype)
    tl.store(out_ptr + token * D + outputs, out, mask=there)


@jit()
def _combine(
    y_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait(PDL)
    outputs = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    _combine_row(
        y_ptr, weights_ptr, residual_ptr, out_ptr, tl.program_id(0).to(tl.int64), outputs, D, K, RESIDUAL
    )


SPAN = 1024


def run(
    x: Tensor | QuantizedRows,
    packed: PackedExperts,
    ids_TK: Tensor,
    weights_TK: Tensor,
    plan: Plan,
    *,
    activation: str,
    residual_TD: Tensor | None = None,
) -> Tensor:
    """Return out [T, D]."""
    num_rows, top_k = ids_TK.shape
    device = ids_TK.device
    hidden, ffn = packed.down.out_features, packed.down.in_features
    num_pairs = num_rows * top_k
    out_TD = torch.empty(num_rows, hidden, dtype=packed.dtype, device=device)
    if num_rows == 0:
        return out_TD
    assert ids_TK.is_contiguous()
    assert weights_TK.is_contiguous()
    assert plan.gate_up.bn == plan.down.bn, "both products have the same units"
    h_PF = torch.empty(num_pairs, ffn, dtype=packed.dtype, device=device)
    y_PD = torch.empty(num_pairs, hidden, dtype=plan.y_dtype, device=device)
    residual_TD = None if residual_TD is None else residual_TD.contiguous()
    paired = not plan.sort
    x_values, x_scale = _operand(x, packed)
    if paired:
        units = Units(ids_TK, ids_TK)
    else:
        units = sort_pairs(ids_TK, packed.num_experts, plan.gate_up.bn)
    common = {
        "K": top_k,
        "D": hidden,
        "F": ffn,
        "FORMAT": FORMATS.index(packed.format),
        "PAIRED": paired,
        "NATIVE": plan.native_fp8,
        "PREFETCH": plan.prefetch and paired,
        "INTERPRETED": interpreted(),
        **pdl_options(device),
    }

    def grid(size: int, tile: Tile) -> tuple[int, int]:
        return -(-size // tile.bm), units.experts.numel()

    _gate_up[grid(ffn, plan.gate_up)](
        x_values,
        x_scale,
        units.experts,
        units.pairs,
        *_operands(packed.gate_up),
        h_PF,
        **_constants(packed.gate_up, plan.gate_up),
        ACTIVATION=activation,
        **common,
    )
    h_values, h_scale = _operand(h_PF, packed)
    _down[grid(hidden, plan.down)](
        h_values,
        h_scale,
        units.experts,
        units.pairs,
        *_operands(packed.down),
        y_PD,
        weights_TK,
        residual_TD,
        out_TD,
        packed.arrivals,
        num_pairs,
        **_constants(packed.down, plan.down),
        E=packed.num_experts,
        RESIDUAL=residual_TD is not None,
        COMBINE=plan.combine,
        **common,
    )
    if not plan.combine:
        _combine[num_rows, -(-hidden // SPAN)](
            y_PD,
            weights_TK,
            residual_TD,
            out_TD,
            D=hidden,
            K=top_k,
            SPAN=SPAN,
            RESIDUAL=residual_TD is not None,
            num_warps=4,
            **pdl_options(device),
        )
    return out_TD


def _operand(x: Tensor | QuantizedRows, packed: PackedExperts) -> tuple[Tensor, Tensor | None]:
    """Return the rows as a product reads them, and their scales where they are e4m3 codes."""
    if isinstance(x, Tensor):
        if packed.format == "fp8_block":
            x = quantize_groups(x, ActivationQuant(group_size=128))
        elif packed.format == "fp8":
            quantized = quantize_rows(x, ActivationQuant())
            assert isinstance(quantized, QuantizedRows)
            x = quantized
        else:
            return x.contiguous(), None
    assert x.values_TK.dtype == FP8, "experts read e4m3 rows"
    return x.values_TK.view(torch.uint8), x.scale_T


def _operands(matrices: ExpertMatrices) -> tuple[Tensor | None, ...]:
    return matrices.data, matrices.scale, matrices.offset, matrices.bias_EO


def _constants(matrices: ExpertMatrices, tile: Tile) -> dict[str, int | bool]:
    scale = matrices.scale
    return {
        "BLOCKS": scale.shape[1] if scale is not None else 0,
        "BM": tile.bm,
        "BN": tile.bn,
        "BK": tile.bk,
        "GROUP": matrices.group_size,
        "ASYMMETRIC": matrices.offset is not None,
        "BIAS": matrices.bias_EO is not None,
        "STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
    }


def native_fp8(device: torch.device) -> bool:
    """Return whether a device multiplies e4m3 by Hopper's tensor cores."""
    return compute_capability(device) == 90 and not interpreted()
