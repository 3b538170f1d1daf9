"""Linears of few rows (decode and verification), bound by the bytes of their weights: launches `stream.cu`,
which documents its sums.

A row's bits are the same in every M and next to any other rows (`stream_plan.py` has the reason). A format's
file packs its weight as a `KernelWeight` and registers the kernels of `decode_kernels.py`.
"""

import ctypes

import torch
from torch import Tensor

from compress.kernels.compilers.nvrtc import TileMap
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
from compress.kernels.linear.shape import TILE_ROWS
from compress.kernels.linear.stream_plan import STATIC_BYTES, Plan, plan
from compress.kernels.operands.gpu import gpu_of
from compress.kernels.operands.rows import QuantizedRows, RawRows

SOURCES = (
    "operands/numbers.cuh",
    "operands/products.cuh",
    "operands/shared.cuh",
    "linear/pieces.cuh",
    "linear/stream.cu",
)
PROGRAM = Program("stream_linear", SOURCES, STATIC_BYTES)


class _Arguments(ctypes.Structure):
    """`Args` of stream.cu."""

    _fields_ = [
        ("x_map", TileMap),
        *(
            (name, ctypes.c_void_p)
            for name in ("w", "x", "w_scale", "x_scale", "bias", "residual", "y", "partials", "arrivals")
        ),
        *(
            (name, ctypes.c_int)
            for name in ("num_tokens", "n", "k", "num_tiles", "tiles", "parts", "segments", "arriving_bytes")
        ),
        *((name, ctypes.c_void_p) for name in ("norm_weight", "static_scale")),
        ("norm_eps", ctypes.c_float),
    ]


def stream(
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
    shape = weight.shape(gated=activation is not None)
    assert x.shape[1] == weight.k
    assert weight.subgroups == 1
    assert out_dtype in (None, dtype, torch.float32)
    y_TO = torch.empty(
        num_rows, weight.n // 2 if shape.gated else weight.n, dtype=out_dtype or dtype, device=device
    )
    if num_rows == 0:
        return y_TO
    gpu = gpu_of(device)
    chosen = chosen or plan(shape, num_rows, gpu)
    partials, arrivals = _partial_sums(chosen, device) if gpu.sm < 90 else (None, None)
    raw = x if isinstance(x, RawRows) and chosen.resident and (x.quant is None or gpu.sm >= 90) else None
    if isinstance(x, RawRows):
        x = x.x_TK if raw is not None else prepare_rows(x)
    x_TI, x_scale_T = (x.values_TK, x.scale_T) if isinstance(x, QuantizedRows) else (x, None)
    x_TI = readable(x_TI)
    residual_TO = None if residual_TO is None else residual_TO.contiguous()
    tensors = (weight.data, x_TI, weight.scale_O, x_scale_T, bias_O, residual_TO, y_TO, partials, arrivals)
    split = chosen.split
    copied = gpu.sm >= 90 and not chosen.resident and weight.format != "fp8"
    arguments = _Arguments(
        TileMap.from_buffer_copy(x_map(x_TI, 8 * chosen.token_tiles, shape.stage_k)) if copied else TileMap(),
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        *(
            num_rows,
            weight.n,
            weight.k,
            shape.num_tiles,
            chosen.tiles,
            split.parts,
            split.segments,
            chosen.arriving_bytes,
        ),
        *raw_arguments(raw),
    )
    normed = raw is not None and raw.weight_K is not None
    float32 = out_dtype == torch.float32
    launched = function_of(
        PROGRAM, chosen, shape, dtype, activation, device, float32, normed, rounding_of(raw)
    )
    launched(chosen.launch, arguments, device=device)
    return y_TO


def _partial_sums(chosen: Plan, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Return memory in which segments add up without clusters: their sums, and how many have arrived."""
    if chosen.split.segments == 1:
        return None, None
    blocks = chosen.launch.grid[0] * chosen.launch.grid[1]
    block_size = 8 * chosen.token_tiles * chosen.tiles * TILE_ROWS
    sums = torch.empty(blocks * block_size, dtype=torch.float32, device=device)
    return sums, torch.zeros(blocks // chosen.split.segments, dtype=torch.int32, device=device)
