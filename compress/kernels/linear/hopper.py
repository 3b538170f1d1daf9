"""Decode linears on Hopper's warpgroup instructions, weights of four, eight and sixteen bits: launches
`hopper.cu`, which documents its sums.

A row's bits are the same in every M and next to any other rows (`hopper_plan.py` has the reason).
"""

import ctypes

import torch
from torch import Tensor

from compress.kernels.compilers.nvrtc import TileMap, tile_map
from compress.kernels.linear.decode_kernels import refuse_partial_tile
from compress.kernels.linear.hopper_plan import STATIC_BYTES, Plan, plan
from compress.kernels.linear.launch import (
    KernelWeight,
    Program,
    function_of,
    prepare_rows,
    raw_arguments,
    readable,
    rounding_of,
    x_map,
)
from compress.kernels.linear.shape import FOUR_BITS
from compress.kernels.operands.gpu import gpu_of
from compress.kernels.operands.rows import QuantizedRows, RawRows
from compress.kernels.problem import Problem

SOURCES = (
    "operands/numbers.cuh",
    "operands/products.cuh",
    "operands/shared.cuh",
    "linear/pieces.cuh",
    "linear/hopper.cu",
)
PROGRAM = Program("hopper_linear", SOURCES, STATIC_BYTES)


class _Arguments(ctypes.Structure):
    """`Args` of hopper.cu."""

    _fields_ = [
        *((name, TileMap) for name in ("w_map", "x_map", "scale_map")),
        *(
            (name, ctypes.c_void_p)
            for name in ("w_scale", "x_scale", "bias", "residual", "y", "raw", "norm_weight", "static_scale")
        ),
        *(
            (name, ctypes.c_int)
            for name in (
                "num_tokens",
                "n",
                "k",
                "tiles",
                "stages",
                "window",
                "early",
                "num_items",
                "token_blocks",
                "inbox_bytes",
                "x_bytes",
                "scale_bytes",
            )
        ),
        ("norm_eps", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("x_zero", "w_sum")),
    ]


def multiply(
    x: Tensor | QuantizedRows | RawRows,
    weight: KernelWeight,
    bias_O: Tensor | None,
    *,
    dtype: torch.dtype,
    activation: str | None,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    chosen: Plan | None = None,
) -> Tensor:
    """Return x W^T: [T, O], or [T, O / 2] when gated, rounded to `dtype` (the model's), then the residual
    added and rounded again; or float32.

    `chosen` is for measuring other plans than the best; no plan changes a bit.
    """
    num_rows = x.shape[0]
    device = weight.data.device
    n = weight.n
    k = weight.k
    shape = weight.shape(gated=activation is not None)
    assert x.shape[1] == k
    assert out_dtype in (None, dtype, torch.float32)
    y_TO = torch.empty(num_rows, n // 2 if shape.gated else n, dtype=out_dtype or dtype, device=device)
    if num_rows == 0:
        return y_TO
    chosen = chosen or plan(shape, num_rows, gpu_of(device), raw=isinstance(x, RawRows))
    raw = x if isinstance(x, RawRows) and chosen.keep is not None else None
    rows = prepare_rows(x) if isinstance(x, RawRows) and raw is None else x
    residual_TO = None if residual_TO is None else residual_TO.contiguous()
    raw_TI = None if raw is None else readable(raw.x_TK)
    x_TI, scale_T = (rows.values_TK, rows.scale_T) if isinstance(rows, QuantizedRows) else (rows, None)
    rows_map = b""
    if isinstance(x_TI, Tensor):
        x_TI = readable(x_TI)
        rows_map = x_map(x_TI, 8 * chosen.token_tiles, chosen.places * shape.stage_k)
    norm_weight, static_scale, eps = raw_arguments(raw)
    zero_T = rows.zero_T if isinstance(rows, QuantizedRows) else None
    assert (zero_T is None) == (weight.sum_O is None), "asymmetric rows need sums of codes, others have none"
    pointers = (
        None if tensor is None else tensor.data_ptr()
        for tensor in (weight.scale_O, scale_T, bias_O, residual_TO, y_TO, raw_TI)
    )
    arguments = _Arguments(
        TileMap(*_weight_map(weight, chosen, shape.gated)),
        TileMap(*rows_map),
        TileMap(*_scale_map(weight, chosen, shape.gated)),
        *(*pointers, norm_weight, static_scale),
        *(
            num_rows,
            n,
            k,
            chosen.tiles,
            chosen.stages,
            chosen.window,
            chosen.stages if chosen.fills else chosen.window,
            chosen.num_items,
            chosen.token_blocks,
            chosen.inbox_bytes,
            chosen.x_bytes,
            chosen.scale_bytes,
            eps,
        ),
        *(None if zero_T is None or each is None else each.data_ptr() for each in (zero_T, weight.sum_O)),
    )
    normed = raw is not None and raw.weight_K is not None
    float32 = out_dtype == torch.float32
    rounding = rounding_of(raw)
    zeros = zero_T is not None
    launched = function_of(
        PROGRAM, chosen, shape, dtype, activation, device, float32, normed, rounding, zeros
    )
    launched(chosen.launch, arguments, device=device)
    return y_TO


def refusal(problem: Problem) -> str | None:
    """Refuse devices other than sm_90, and N that fills no whole tiles."""
    return "its instructions are sm_90's alone" if problem.sm != 90 else refuse_partial_tile(problem)


def _weight_map(weight: KernelWeight, chosen: Plan, gated: bool) -> bytes:
    """Describe the row tiles of a unit, in the chunks of a stage, to the copy engine; gated weights of 8 and
    16 bits have each 8 gate rows over their 8 up rows."""
    tiles = chosen.tiles
    places = chosen.places
    if weight.format in FOUR_BITS:
        return tile_map(
            weight.data.view(torch.int64), (tiles, places, weight.data.shape[-1] // 8), swizzled=False
        )
    columns = 128 // weight.data.element_size()  # of a chunk, which is 128 bytes wide
    if not gated:
        return tile_map(
            weight.data.unflatten(1, (-1, columns)).transpose(0, 1), (places, 16 * tiles, columns)
        )
    return tile_map(
        weight.data.view(2, -1, 8, weight.k // columns, columns).permute(3, 1, 0, 2, 4),
        (places, tiles, 2, 8, columns),
    )


def _scale_map(weight: KernelWeight, chosen: Plan, gated: bool) -> bytes:
    """Describe the scales of a unit's rows, in the chunks of a stage, in the order of its rows."""
    if weight.scale_KO is None:
        return b""
    if not gated:
        view = weight.scale_KO.unflatten(1, (-1, 16))
        return tile_map(view, (chosen.places, chosen.tiles, 16), swizzled=False)
    view = weight.scale_KO.unflatten(1, (2, -1, 8)).transpose(1, 2)
    return tile_map(view, (chosen.places, chosen.tiles, 2, 8), swizzled=False)
