"""W8A8 linear of many rows of int8, in one pass: sums in int32 on the tensor cores, both scales, the bias and
the residual before a result leaves the registers.

    y = (x_values W_codes^T) x_scale w_scale        scaled in float32, rounded once after the bias
    y = (x_values W_codes^T - x_zero w_sum) x_scale w_scale         asymmetric rows (`int8.py`)

A library's product (`torch._int_mm`) writes its sums as int32, which a second pass reads: four bytes written
and four read, and two for each result (`prefill_int8_passes.py`). Sums are exact, so no tile changes a
bit, and without a bias the bits are those of the reference.

A program owns tiles of rows by outputs, neighbours in bands of rows, which read the same weights from L2.
Hopper's copy engine brings the factors.

Shapes: T rows, O out, K inputs.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.compilers.triton import (
    interpreted,
    jit,
    launch_dependents,
    pdl_enabled,
    pdl_options,
    tensor_descriptor,
    tl,
    triton_refusal,
    wait,
)
from compress.kernels.linear.int8 import SCHEMES, PackedInt8, refuse_long_sums, repack, zero_operands
from compress.kernels.linear.launch import readable
from compress.kernels.operands.gpu import Gpu, gpu_of
from compress.kernels.operands.rows import INT8, QuantizedRows
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register

ALIGNMENT = 16
"""Divisor of K: rows begin on 16 bytes for the copy engine."""
BAND = 8
"""Tiles of rows in a band."""
MOST_TILES = 1 << 30


@dataclass(frozen=True)
class PromptTile:
    """The rows, outputs and columns of a step of a tile, the warps of a program and the stages of its
    pipeline. `persistent` gives a program every tile that is its multiprocessor's, and loads for the next one
    while the last is written; otherwise each tile has a program."""

    rows: int
    outputs: int
    columns: int
    num_warps: int
    num_stages: int
    persistent: bool


TILES = {
    80: (
        (PromptTile(128, 256, 128, 8, 3, False), 1.0),
        (PromptTile(128, 128, 128, 8, 3, False), 0.55),
        (PromptTile(64, 128, 128, 4, 4, False), 0.32),
    ),
    90: (
        (PromptTile(128, 128, 128, 4, 3, False), 1.0),
        (PromptTile(128, 128, 128, 8, 4, True), 1.34),
        (PromptTile(64, 128, 128, 4, 5, True), 0.85),
    ),
}
"""Tiles and the time of each as a share of the first one's, by compute capability. Those of sm_90 follow from
`benchmarks/h200/int8.json` (gate_up over 2,048 rows; two blocks of the first share a multiprocessor), those
of sm_80 are estimates from arithmetic and reads."""


@functools.cache
def tile_of(out_features: int, num_rows: int, gpu: Gpu, *, float32: bool = False) -> PromptTile:
    """Return the tile whose rounds over the multiprocessors take the least time. Results of `float32` take
    more shared memory than the first leaves."""

    def time_of(choice: tuple[PromptTile, float]) -> float:
        tile, each = choice
        return -(-num_tiles(tile, out_features, num_rows) // gpu.num_sms) * each

    choices = TILES[90 if gpu.sm >= 90 else 80]
    return min(choices[1:] if float32 else choices, key=time_of)[0]


def num_tiles(tile: PromptTile, out_features: int, num_rows: int) -> int:
    """Return the tiles of a product."""
    return -(-out_features // tile.outputs) * -(-num_rows // tile.rows)


@jit(varying=("num_rows",))
def _linear(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    x_boxes: tl.tensor,
    w_boxes: tl.tensor,
    x_scale_ptr: tl.tensor,
    w_scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    x_zero_ptr: tl.tensor,
    w_sum_ptr: tl.tensor,
    y_ptr: tl.tensor,
    num_rows: tl.tensor,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BAND: tl.constexpr,
    STRIDE: tl.constexpr,
    PERSISTENT: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BOXES: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Write every `STRIDE`-th tile of `ROWS` rows by `OUTPUTS` outputs."""
    launch_dependents(PDL)
    wait(PDL)
    row_tiles = (num_rows + ROWS - 1) // ROWS
    OUTPUT_TILES: tl.constexpr = (OUT + OUTPUTS - 1) // OUTPUTS
    columns = tl.arange(0, COLUMNS)
    for tile in tl.range(tl.program_id(0), row_tiles * OUTPUT_TILES, STRIDE, flatten=PERSISTENT):
        band = tile // (BAND * OUTPUT_TILES) * BAND
        height = tl.minimum(row_tiles - band, BAND)
        within = tile % (BAND * OUTPUT_TILES)
        first_row = (band + within % height) * ROWS
        first_output = within // height * OUTPUTS
        rows = first_row + tl.arange(0, ROWS)
        outputs = first_output + tl.arange(0, OUTPUTS)
        x_at = x_ptr + (tl.minimum(rows, num_rows - 1).to(tl.int64) * IN)[:, None] + columns[None, :]
        w_at = w_ptr + (tl.minimum(outputs, OUT - 1).to(tl.int64) * IN)[:, None] + columns[None, :]
        sums = tl.zeros([ROWS, OUTPUTS], dtype=tl.int32)
        for at in tl.range(0, IN, COLUMNS, num_stages=STAGES):
            if BOXES:  # zeros past the ends
                x = x_boxes.load([first_row, at])
                w = w_boxes.load([first_output, at])
            elif IN % COLUMNS == 0:
                x = tl.load(x_at + at)
                w = tl.load(w_at + at)
            else:
                inside = (columns < IN - at)[None, :]
                x = tl.load(x_at + at, mask=inside, other=0)
                w = tl.load(w_at + at, mask=inside, other=0)
            sums = tl.dot(x, tl.trans(w), sums, out_dtype=tl.int32)
        x_scale = tl.load(x_scale_ptr + rows, mask=rows < num_rows, other=0.0)
        w_scale = tl.load(w_scale_ptr + outputs, mask=outputs < OUT, other=0.0)
        if x_zero_ptr is not None:
            x_zero = tl.load(x_zero_ptr + rows, mask=rows < num_rows, other=0)
            w_sum = tl.load(w_sum_ptr + outputs, mask=outputs < OUT, other=0)
            sums -= x_zero[:, None] * w_sum[None, :]
        y = sums.to(tl.float32) * x_scale[:, None] * w_scale[None, :]
        if BIAS:
            y += tl.load(bias_ptr + outputs, mask=outputs < OUT, other=0.0).to(tl.float32)[None, :]
        y = y.to(y_ptr.dtype.element_ty)
        at_y = rows.to(tl.int64)[:, None] * OUT + outputs[None, :]
        there = (rows < num_rows)[:, None] & (outputs < OUT)[None, :]
        if RESIDUAL:
            residual = tl.load(residual_ptr + at_y, mask=there, other=0.0)
            y = (residual.to(tl.float32) + y.to(tl.float32)).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + at_y, y, mask=there)


def linear(
    x: QuantizedRows,
    packed: PackedInt8,
    bias_O: Tensor | None,
    *,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tile: PromptTile | None = None,
) -> Tensor:
    """Return x W^T, [T, O]. `tile` is for measuring others than the one chosen."""
    assert x.values_TK.dtype == INT8, "rows of another type than the weight's"
    num_rows, k = x.shape
    assert k == packed.k, f"rows of {k} columns for a weight of {packed.k}"
    device = packed.codes_OI.device
    y_TO = torch.empty(num_rows, packed.n, dtype=out_dtype or packed.dtype, device=device)
    if num_rows == 0:
        return y_TO
    gpu = Gpu(90, 2, 0) if interpreted() else gpu_of(device)
    tile = tile or tile_of(packed.n, num_rows, gpu, float32=y_TO.dtype == torch.float32)
    values_TK = readable(x.values_TK)
    boxes = pdl_enabled(device)
    programs = num_tiles(tile, packed.n, num_rows)
    stride = gpu.num_sms if tile.persistent else MOST_TILES
    _linear[(min(programs, stride),)](
        values_TK,
        packed.codes_OI,
        tensor_descriptor(values_TK, [tile.rows, tile.columns]) if boxes else None,
        tensor_descriptor(packed.codes_OI, [tile.outputs, tile.columns]) if boxes else None,
        x.scale_T.contiguous(),
        packed.scale_O,
        bias_O,
        None if residual_TO is None else residual_TO.contiguous(),
        *zero_operands(x, packed),
        y_TO,
        num_rows,
        OUT=packed.n,
        IN=k,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        COLUMNS=tile.columns,
        BAND=BAND,
        STRIDE=stride,
        PERSISTENT=tile.persistent,
        BIAS=bias_O is not None,
        RESIDUAL=residual_TO is not None,
        BOXES=boxes,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **pdl_options(device),
    )
    return y_TO


def refusal(problem: Problem) -> str | None:
    """Return why this kernel cannot serve a problem, or None."""
    if problem.scheme not in SCHEMES:
        return f"for {', '.join(SCHEMES)}"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"gives 16 bits, and the model is {problem.dtype}"
    if problem.activation is not None:
        return "applies no activation"
    if problem.row_invariant:
        return "for the rows of prompts"
    if problem.k % ALIGNMENT:
        return f"K = {problem.k} is no multiple of {ALIGNMENT}"
    return triton_refusal(problem) or refuse_long_sums(problem)


register(
    Kernel(
        "linear", "triton.int8.prefill", min_sm=80, priority=10, supports=refusal, fn=linear, repack=repack
    )
)
