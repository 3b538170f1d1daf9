"""Products of few rows in slices of I: launches `slices.cu`, which documents its sums."""

import ctypes
import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.kernels.compilers.nvrtc import Function, Launch, Source, source_text
from compress.kernels.operands.gpu import gpu_of
from compress.kernels.operands.matrices import FORMATS, IN_WORDS, Matrices, MatrixFormat, whole_blocks
from compress.models.layer_shape import UNGATED

SLICES = 8
ITEMS = 4
"""Items of a block whose warps have one each."""
ACTIVATIONS = (None, "silu", "gelu", "gelu_pytorch_tanh", "swiglu_clamped", "silu_capped")
"""None, and the activations of gates: the macro ACT."""
Rows = Literal["in order", "chosen", "by pair"]
ROWS: tuple[Rows, ...] = ("in order", "chosen", "by pair")
"""The rows of x that a unit reads: the next ones, those of the tokens of its pairs, or those of its pairs,
where the launch ahead does not write the units. The macro UNITS."""
STATIC_BYTES = 1024
"""Shared memory that a block keeps for the system, with a margin."""
SOURCES = ("operands/numbers.cuh", "operands/products.cuh", "operands/global.cuh", "operands/slices.cu")


def activation_macros(activation: str | None, cap: float | None = None) -> dict[str, float]:
    """Return the macros of an activation, and of the cap of gates and of what they multiply."""
    macros: dict[str, float] = (
        {"ACT": 0, "RELU2": 1} if activation == "relu2" else {"ACT": ACTIVATIONS.index(activation)}
    )
    return macros if cap is None else {**macros, "CAP": float(cap)}


@dataclass(frozen=True)
class Tile:
    """The tiles of 16 outputs and of 8 rows of an item, the steps that a warp has under way, the blocks of a
    multiprocessor at least, and the warps that share the slices of an item: 1, 2, 4 or 8. Steps under way
    wait in shared memory where `staged`, else in registers. None of them changes a bit."""

    output_tiles: int
    row_tiles: int
    depth: int
    blocks: int
    parts: int
    staged: bool = False

    @property
    def warps(self) -> int:
        """Warps of a block at most."""
        return self.parts if self.parts > 1 else ITEMS

    @property
    def kept_sums(self) -> int:
        """Slices whose sums have a place of their own while a warp works."""
        if self.parts == 1:
            return 1
        return SLICES // self.parts if self.parts < SLICES else 0


@dataclass(frozen=True)
class Chosen:
    """Experts of units [U], -1 after the last, and their pairs [U, 8 row_tiles], -1 where a unit has fewer;
    no pairs where unit u is pair u. A pair is one of the `top_k` choices of a token."""

    experts: Tensor
    pairs: Tensor | None
    top_k: int


@dataclass(frozen=True)
class Sum:
    """The sum over the choices of each token, which one block forms: weights [T, K], and a residual [T, O] or
    None."""

    weights_TK: Tensor
    residual_TO: Tensor | None


@dataclass(frozen=True)
class Variant:
    """The constants that the kernel is compiled with."""

    format: MatrixFormat
    dtype: torch.dtype
    subgroups: int
    offsets: bool
    tail: bool
    activation: str | None
    rows: Rows
    choices: int
    float32_output: bool
    tile: Tile
    zero_points: bool = False
    cap: float | None = None

    @property
    def source(self) -> Source:
        macros = {
            "FORMAT": FORMATS.index(self.format),
            "F16": int(self.dtype == torch.float16),
            "SUBGROUPS": self.subgroups,
            "OFFSETS": int(self.offsets),
            "TAIL": int(self.tail),
            **activation_macros(self.activation, self.cap),
            "UNITS": ROWS.index(self.rows),
            "COMBINE": self.choices,
            "OUT32": int(self.float32_output),
            "PARTS": self.tile.parts,
            "STAGED": int(self.tile.staged),
            "MT": self.tile.output_tiles,
            "NT": self.tile.row_tiles,
            "DEPTH": self.tile.depth,
            "WARPS": self.warps,
            "BLOCKS": self.tile.blocks,
            **({"ZEROS": 1} if self.zero_points else {}),
        }
        return Source(source_text(*SOURCES), "sliced_product", tuple(macros.items()))

    @property
    def matrices(self) -> int:
        """Gate and up, or one."""
        return 1 if self.activation is None or self.activation in UNGATED else 2

    @property
    def warps(self) -> int:
        """Warps of a block at most."""
        return self.choices * self.tile.parts if self.choices else self.tile.warps

    def shared_bytes(self, steps: int) -> int:
        """Return the bytes of the sums of all warps and of their steps under way, and of the scales of x."""
        tile = self.tile
        tiles = tile.output_tiles * self.matrices
        scales = 32 * tile.row_tiles * steps if self.format == "fp8_block" else 0
        w = 1 if self.format in IN_WORDS else 2
        x = 4 if self.format in (*IN_WORDS, "w8") else 2
        staged = tile.depth * (2 * w * tiles + x * tile.row_tiles) * 512 if tile.staged else 0
        sums = tiles * tile.row_tiles * 512
        own = staged + tile.kept_sums * sums if tile.kept_sums else max(staged, sums)
        return self.warps * own + scales


def variant_of(
    matrices: Matrices,
    tile: Tile,
    *,
    dtype: torch.dtype,
    activation: str | None,
    out_dtype: torch.dtype,
    rows: Rows = "in order",
    choices: int = 0,
    zero_points: bool = False,
    cap: float | None = None,
) -> Variant:
    """Return what the kernel is compiled for to serve weights."""
    return Variant(
        format=matrices.format,
        dtype=dtype,
        subgroups=max(1, 128 // matrices.group_size) if matrices.format in IN_WORDS else 1,
        offsets=matrices.offset is not None,
        tail=matrices.in_features % _columns(matrices) != 0,
        activation=activation,
        rows=rows,
        choices=choices,
        float32_output=out_dtype == torch.float32,
        tile=tile,
        zero_points=zero_points,
        cap=cap,
    )


def steps_of(matrices: Matrices) -> int:
    """Return the steps of a sum over I."""
    return -(-matrices.in_features // _columns(matrices))


def _columns(matrices: Matrices) -> int:
    """Return the columns of a step."""
    return 64 if matrices.format == "dense16" else 128


class _Arguments(ctypes.Structure):
    """`Args` of slices.cu."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "x",
                "x_scale",
                "w",
                "scale",
                "offset",
                "bias",
                "residual",
                "y",
                "experts",
                "pairs",
                "weights",
                "combined",
            )
        ),
        *((name, ctypes.c_longlong) for name in ("expert_bytes", "expert_scales")),
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
                "choices",
            )
        ),
        *((name, ctypes.c_void_p) for name in ("x_zero", "w_sum", "outer")),
    ]


def multiply(
    x: Tensor,
    x_scale: Tensor | None,
    matrices: Matrices,
    y: Tensor,
    tile: Tile,
    *,
    dtype: torch.dtype,
    num_rows: int,
    activation: str | None = None,
    cap: float | None = None,
    scale_rows: int = 128,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    rows: Rows = "in order",
    chosen: Chosen | None = None,
    total: Sum | None = None,
    zeros: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write y = x W^T of `num_rows` rows in order, or of the pairs of `chosen`: [.., O], or [.., O / 2] with
    a gate, in the model's `dtype` or in float32; or the `total` of each token's pairs, [T, O].

    x are numbers of that dtype, or e4m3 or int8 codes with their scales. `scale_rows` outputs share a scale
    of fp8_block. The residual is of rows in order, and so are `zeros`: the zero points [T] of asymmetric int8
    rows and the sums [O] of the codes of each output, int32.
    """
    device = matrices.data.device
    steps = steps_of(matrices)
    per = -(-steps // SLICES)
    in_words = matrices.format in IN_WORDS
    group = matrices.group_size
    scale = matrices.scale
    variant = variant_of(
        matrices,
        tile,
        dtype=dtype,
        activation=activation,
        out_dtype=y.dtype,
        rows=rows,
        choices=0 if total is None or chosen is None else chosen.top_k,
        zero_points=zeros is not None,
        cap=cap,
    )
    tensors = (
        x,
        x_scale,
        matrices.data,
        scale,
        matrices.offset,
        bias,
        residual if total is None else total.residual_TO,
        y if total is None else None,
        None if chosen is None else chosen.experts,
        None if chosen is None else chosen.pairs,
        None if total is None else total.weights_TK,
        None if total is None else y,
    )
    arguments = _Arguments(
        *(None if each is None else each.data_ptr() for each in tensors),
        matrices.data[0].numel() * matrices.data.element_size(),
        0 if scale is None else scale[0].numel(),
        matrices.out_features,
        matrices.in_features,
        steps,
        per,
        max(1, group // 128) if in_words else 1,
        scale_rows,
        whole_blocks(matrices.in_features) // group if in_words else 0,
        num_rows,
        1 if chosen is None else chosen.top_k,
        *((None, None) if zeros is None else (each.data_ptr() for each in zeros)),
        None if matrices.outer is None else matrices.outer.data_ptr(),
    )
    size = matrices.out_features // variant.matrices
    tiles = -(-size // (16 * tile.output_tiles))
    slices = -(-steps // per)
    parts = -(-slices * tile.parts // SLICES) if tile.parts > 1 else 1
    if total is not None:
        grid = (tiles, num_rows)
        warps = variant.choices * parts
    else:
        units = -(-num_rows // (8 * tile.row_tiles)) if chosen is None else chosen.experts.numel()
        grid = (tiles if tile.parts > 1 else -(-tiles // ITEMS), units)
        warps = parts if tile.parts > 1 else ITEMS
    launch = Launch(
        grid=grid,
        threads=32 * warps,
        shared_bytes=variant.shared_bytes(steps),
        overlap=gpu_of(device).sm >= 90,
    )
    _function(variant, device)(launch, arguments, device=device)


@functools.cache
def _function(variant: Variant, device: torch.device) -> Function:
    gpu = gpu_of(device)
    return Function(variant.source, device=device, shared_bytes=gpu.shared_bytes - STATIC_BYTES, sm=gpu.sm)
