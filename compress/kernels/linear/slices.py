"""Decode linears of every format and size by products in slices: launches `slices.cu`, which documents its
sums.

    y = act(gate(x)) * up(x) or W x, rounded to the model's dtype after the bias, plus the residual

They serve what no tuned kernel does: e4m3 weights in blocks of 128 x 128, codes of four bits in groups of 32
or 64 columns or with one scale a channel, I that is no multiple of 128 (gpt-oss has 2,880), heads of an odd
vocabulary.
"""

import ctypes
import functools
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.kernels.compilers.nvrtc import Function, Launch, Source, source_text
from compress.kernels.linear.blocks import REPACKS, Blocks, as_blocks, refusal
from compress.kernels.linear.launch import ACTIVATIONS, readable
from compress.kernels.operands.gpu import gpu_of
from compress.kernels.operands.matrices import FORMATS, Matrices, MatrixFormat, whole_blocks
from compress.kernels.operands.rows import QuantizedRows
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register

SLICES = 8
ITEMS = 4
"""Items of a block whose warps have one each."""
MANY_ITEMS = 800
"""Items of 32 outputs and 32 rows from which a warp has all slices of its own."""
MAX_DECODE_ROWS = 512
STATIC_BYTES = 1024
"""Shared memory that a block keeps for the system."""
SOURCES = ("operands/numbers.cuh", "operands/products.cuh", "linear/slices.cu")


@dataclass(frozen=True)
class Tile:
    """The tiles of 16 outputs and of 8 rows of an item, the steps that a warp has under way, and the blocks
    of a multiprocessor at least; `split` gives each slice a warp, else one has all. None of them changes a
    bit."""

    output_tiles: int
    row_tiles: int
    depth: int
    blocks: int
    split: bool

    @property
    def warps(self) -> int:
        """Warps of a block at most."""
        return SLICES if self.split else ITEMS


def tile_of(matrices: Matrices, num_rows: int, *, gated: bool) -> Tile:
    """Return the tile of decode rows. Sizes were chosen by measurement (`docs/LOG.md`, 2026-11-23): a warp
    for each slice while items are few, and steps under way as far as registers allow two blocks."""
    size = matrices.out_features // (2 if gated else 1)
    steps = steps_of(matrices)
    if num_rows <= 16:
        row_tiles = 1 if num_rows <= 8 else 2
        if gated or (row_tiles == 1 and steps <= 3 * SLICES):
            return Tile(1, row_tiles, 1, 1, True)
        return Tile(1, row_tiles, 3 if matrices.format == "dense16" and row_tiles == 1 else 2, 1, True)
    items = -(-size // 32) * -(-num_rows // 32)
    if items >= MANY_ITEMS:
        return Tile(4 if matrices.format == "dense16" and not gated else 2, 4, 1, 2, False)
    if gated:
        return Tile(1, 8 if num_rows > 32 else 4, 1, 1, True)
    return Tile(2, 4, 1, 1, True) if steps > 7 * SLICES else Tile(1, 4, 1, 2, True)


def steps_of(matrices: Matrices) -> int:
    """Return the steps of a sum over I."""
    return -(-matrices.in_features // (64 if matrices.format == "dense16" else 128))


@dataclass(frozen=True)
class Variant:
    """The constants that the kernel is compiled with."""

    format: MatrixFormat
    dtype: torch.dtype
    subgroups: int
    offsets: bool
    activation: str | None
    float32_output: bool
    tile: Tile

    @property
    def source(self) -> Source:
        macros = {
            "FORMAT": FORMATS.index(self.format),
            "F16": int(self.dtype == torch.float16),
            "SUBGROUPS": self.subgroups,
            "OFFSETS": int(self.offsets),
            "ACT": ACTIVATIONS.index(self.activation),
            "OUT32": int(self.float32_output),
            "SPLIT": int(self.tile.split),
            "MT": self.tile.output_tiles,
            "NT": self.tile.row_tiles,
            "DEPTH": self.tile.depth,
            "WARPS": self.tile.warps,
            "BLOCKS": self.tile.blocks,
        }
        return Source(source_text(*SOURCES), "sliced_linear", tuple(macros.items()))

    def shared_bytes(self, steps: int) -> int:
        """Return the bytes of the sums of all warps, and of the scales of x."""
        tiles = self.tile.output_tiles * (1 if self.activation is None else 2)
        scales = 32 * self.tile.row_tiles * steps if self.format == "fp8_block" else 0
        return self.tile.warps * tiles * self.tile.row_tiles * 512 + scales


def variant_of(blocks: Blocks, tile: Tile, activation: str | None, out_dtype: torch.dtype) -> Variant:
    """Return what the kernel is compiled for to serve a weight."""
    matrices = blocks.matrices
    return Variant(
        format=matrices.format,
        dtype=blocks.dtype,
        subgroups=max(1, 128 // matrices.group_size) if matrices.format == "w4" else 1,
        offsets=matrices.offset is not None,
        activation=activation,
        float32_output=out_dtype == torch.float32,
        tile=tile,
    )


class _Arguments(ctypes.Structure):
    """`Args` of slices.cu."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "x_scale", "w", "scale", "offset", "bias", "residual", "y")
        ),
        *(
            (name, ctypes.c_int)
            for name in (
                "out",
                "in_",
                "steps",
                "per",
                "scale_steps",
                "scale_rows",
                "num_scales",
                "num_rows",
            )
        ),
    ]


def linear(
    x: Tensor | QuantizedRows,
    packed: Any,
    bias_O: Tensor | None,
    *,
    activation: str | None,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Return x W^T, [T, O], or [T, O / 2] with an activation; a row's bits depend on the row alone.

    `tile` is for measuring others than the one chosen.
    """
    blocks = as_blocks(packed)
    matrices = blocks.matrices
    (num_rows, in_features) = x.shape
    size = matrices.out_features if activation is None else matrices.out_features // 2
    device = matrices.data.device
    values, x_scale = (x.values_TK, x.scale_T.contiguous()) if isinstance(x, QuantizedRows) else (x, None)
    values = readable(values)
    y_TO = torch.empty(num_rows, size, dtype=out_dtype or blocks.dtype, device=device)
    if num_rows == 0:
        return y_TO
    tile = tile or tile_of(matrices, num_rows, gated=activation is not None)
    steps = steps_of(matrices)
    per = -(-steps // SLICES)
    is_w4 = matrices.format == "w4"
    group = matrices.group_size
    variant = variant_of(blocks, tile, activation, y_TO.dtype)
    residual_TO = None if residual_TO is None else residual_TO.contiguous()
    tensors = (values, x_scale, matrices.data, matrices.scale, matrices.offset, bias_O, residual_TO, y_TO)
    arguments = _Arguments(
        *(None if each is None else each.data_ptr() for each in tensors),
        matrices.out_features,
        in_features,
        steps,
        per,
        max(1, group // 128) if is_w4 else 1,
        blocks.scale_rows,
        whole_blocks(in_features) // group if is_w4 else 0,
        num_rows,
    )
    tiles = -(-size // (16 * tile.output_tiles))
    launch = Launch(
        grid=(tiles if tile.split else -(-tiles // ITEMS), -(-num_rows // (8 * tile.row_tiles))),
        threads=32 * (-(-steps // per) if tile.split else ITEMS),
        shared_bytes=variant.shared_bytes(steps),
        overlap=gpu_of(device).sm >= 90,
    )
    _function(variant, device)(launch, arguments, device=device)
    return y_TO


@functools.cache
def _function(variant: Variant, device: torch.device) -> Function:
    gpu = gpu_of(device)
    return Function(variant.source, device=device, shared_bytes=gpu.shared_bytes - STATIC_BYTES, sm=gpu.sm)


def _refusal(problem: Problem, *, given: MatrixFormat, activation: str | None) -> str | None:
    if problem.m_max > MAX_DECODE_ROWS:
        return f"for M up to {MAX_DECODE_ROWS}"
    return refusal(problem, given=given, activation=activation, decode=True)


for _given in FORMATS:
    for _activation in ACTIVATIONS:
        register(
            Kernel(
                "linear",
                ".".join(["cuda.slices", _given, *([_activation] if _activation else [])]),
                min_sm=80,
                priority=5,
                supports=partial(_refusal, given=_given, activation=_activation),
                fn=partial(linear, activation=_activation),
                repack=REPACKS[_given],
            )
        )
