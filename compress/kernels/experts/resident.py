"""Experts of decode rows on Hopper with weights of 16 bits and of e4m3, in one launch: gate and up, their
activation and down, by blocks that stay (`resident.cu`, which documents its sums and its work).

A few rows whose choices fit the tiles of two stages are units pair by pair, and a block adds the choices of a
token. More rows are sorted by expert, into units of eight, or of 16 where experts have many, and one more
launch adds.
"""

import ctypes
import functools
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compress.kernels.compilers.nvrtc import Function, Launch, Source, TileMap, source_text, tile_map
from compress.kernels.compilers.triton import triton_refusal
from compress.kernels.experts.launch import MAX_PAIRED_ROWS, add_choices
from compress.kernels.experts.packed import (
    MOST_PAIRS,
    MOST_UNITS,
    RESIDENT,
    PackedExperts,
    format_of_problem,
    refusal,
    repack,
    rounds_apart,
)
from compress.kernels.experts.reference import ACTIVATIONS
from compress.kernels.experts.units import sort_pairs
from compress.kernels.operands.gpu import gpu_of
from compress.kernels.operands.matrices import FORMATS, Matrices, MatrixFormat
from compress.kernels.operands.slices import activation_macros
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register

SOURCES = (
    "operands/numbers.cuh",
    "operands/products.cuh",
    "operands/global.cuh",
    "operands/shared.cuh",
    "experts/resident.cu",
)
MOST_BLOCKS = 160
"""Multiprocessors of a GPU, at most."""
MOST_ROWS = 128
"""Rows at most: of more, experts have several units, which each read the weights again."""
MANY = {"dense16": 4, "fp8": 5, "fp8_block": 5}
"""Rows of an expert, on average, from which on its units have 16 rows."""
TILES = 8
"""Tiles of 16 outputs of a stage."""
COPIED_TILES = TILES // 2
"""Tiles of a copy, at most."""
MOST_CHOICES = 2 * TILES
"""Choices of a token whose pairs are units: two stages have a tile for each."""
ROW_BYTES = 128
"""Bytes of a row of weights in a stage."""
STAGE_BYTES = 16 * TILES * ROW_BYTES
PARTS = 4
"""Parts of a sum, of which each has a team of four warps."""
THREADS = 32 * (4 * PARTS + 1)
MOST_STAGES = 8
"""Stages at most: with more of them on their way, h takes longer from block to block."""
SHARED_BYTES = 232448
"""Shared memory that a block of sm_90 may have."""


@dataclass(frozen=True)
class Variant:
    """The constants that the kernel is compiled with: `choices` of a token where every pair is a unit, else
    0, and `tokens` of a unit."""

    format: MatrixFormat
    dtype: torch.dtype
    activation: str
    choices: int
    tokens: int
    cap: float | None = None

    @property
    def source(self) -> Source:
        macros = {
            "FORMAT": FORMATS.index(self.format),
            "F16": int(self.dtype == torch.float16),
            **activation_macros(self.activation, self.cap),
            "CHOICES": self.choices,
            "TOKENS": self.tokens,
            "QUANT": 1,
        }
        return Source(source_text(*SOURCES), "resident_experts", tuple(macros.items()))


def stages_of(
    format: MatrixFormat, hidden: int, ffn: int, num_units: int, *, choices: int, tokens: int
) -> int:
    """Return the stages that shared memory has room for, as many for each part of a sum: who waits for a
    stage has read what it held before. `choices` are those of a token where pairs are units, else 0."""
    halves = 2 if choices > TILES else 1
    tiles = halves * TILES
    columns = ROW_BYTES // (2 if format == "dense16" else 1)
    x_steps = -(-hidden // columns)
    h_steps = -(-ffn // columns)
    longest = max(x_steps, h_steps)
    rows = 2 * columns * (max(x_steps, tiles * h_steps) if choices else tokens * longest)
    scales = 4 * halves * tokens * (longest if format == "fp8_block" else 1)
    parts = 4 * PARTS * tiles * 16 * tokens * (1 if choices or tokens > 8 else 2)
    rest = 16 * MOST_STAGES + 96 + 16 * PARTS + 4 * tiles + 4 * tokens + 4 * MOST_BLOCKS + 4 * num_units
    room = (SHARED_BYTES - rows - scales - parts - rest) // STAGE_BYTES
    return min(MOST_STAGES, max(0, room) // (halves * PARTS) * halves * PARTS)


def has_pairs(format: MatrixFormat, hidden: int, ffn: int, top_k: int) -> bool:
    """Return whether the pairs of a few rows can be units."""
    return top_k <= MOST_CHOICES and stages_of(format, hidden, ffn, MOST_PAIRS, choices=top_k, tokens=8) > 0


def gate_tiles_of(ffn: int, num_units: int, blocks: int, *, matrices: int) -> int:
    """Return the tiles of each of the matrices, gate and up or up, of an item with which the blocks that have
    most have least, where the start and the end of an item count as two tiles."""

    def most_of_a_block(gate_tiles: int) -> tuple[int, int]:
        items = num_units * -(-ffn // (16 * gate_tiles))
        return -(-items // blocks) * (matrices * gate_tiles + 2), -gate_tiles

    return min(range(1, TILES // matrices + 1), key=most_of_a_block)


class _Arguments(ctypes.Structure):
    """`Args` of resident.cu."""

    _fields_ = [
        *((name, TileMap) for name in ("gate_up_map", "down_map")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "x",
                "residual",
                "gate_up_bias",
                "down_bias",
                "gate_up_scale",
                "down_scale",
                "h",
                "y",
                "out",
                "experts",
                "pairs",
                "weights",
                "state",
            )
        ),
        *(
            (name, ctypes.c_int)
            for name in (
                "hidden",
                "ffn",
                "num_units",
                "num_rows",
                "choices",
                "stages",
                "gate_tiles",
                "gate_items",
                "down_items",
                "num_counters",
            )
        ),
    ]


def decode(
    x_TD: Tensor,
    packed: PackedExperts,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    activation: str,
    residual_TD: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return [T, D]; a row's bits depend on the row alone."""
    num_rows, top_k = ids_TK.shape
    device = ids_TK.device
    hidden = packed.down.out_features
    ffn = packed.down.in_features
    out_TD = torch.empty(num_rows, hidden, dtype=packed.dtype, device=device)
    if num_rows == 0:
        return out_TD
    assert ids_TK.is_contiguous()
    assert weights_TK.is_contiguous()
    x_TD = x_TD.contiguous()
    residual_TD = None if residual_TD is None else residual_TD.contiguous()
    few = num_rows <= MAX_PAIRED_ROWS and num_rows * top_k <= MOST_PAIRS
    paired = few and has_pairs(packed.format, hidden, ffn, top_k)
    choices = top_k if paired else 0
    many = not paired and num_rows * top_k >= MANY[packed.format] * packed.num_experts
    tokens = 16 if many and stages_of(packed.format, hidden, ffn, MOST_UNITS, choices=0, tokens=16) else 8
    experts = ids_TK
    pairs = h_PF = y_PD = None
    if not paired:
        units = sort_pairs(ids_TK, packed.num_experts, tokens)
        experts = units.experts
        pairs = units.pairs
        h_PF = torch.empty(num_rows * top_k, ffn, dtype=packed.dtype, device=device)
        y_PD = torch.empty(num_rows * top_k, hidden, dtype=torch.float32, device=device)
    num_units = experts.numel()
    blocks = gpu_of(device).num_sms
    assert num_units <= MOST_UNITS
    assert blocks <= MOST_BLOCKS
    matrices = 2 if packed.gated else 1
    gate_tiles = gate_tiles_of(ffn, num_units, blocks, matrices=matrices) if paired else TILES // matrices
    down_tiles = max(1, min(TILES // top_k, COPIED_TILES)) if paired else TILES
    tensors = (
        x_TD,
        residual_TD,
        packed.gate_up.bias_EO,
        packed.down.bias_EO,
        packed.gate_up.scale,
        packed.down.scale,
        h_PF,
        y_PD,
        out_TD,
        experts,
        pairs,
        weights_TK,
        packed.state,
    )
    arguments = _Arguments(
        _map_of(packed.gate_up, 16 * gate_tiles if packed.gated else 16),
        _map_of(packed.down, 16 if paired else 16 * COPIED_TILES),
        *(None if each is None else each.data_ptr() for each in tensors),
        hidden,
        ffn,
        num_units,
        num_rows,
        top_k,
        stages_of(packed.format, hidden, ffn, num_units, choices=choices, tokens=tokens),
        gate_tiles,
        -(-ffn // (16 * gate_tiles)),
        -(-hidden // (16 * down_tiles)),
        MOST_UNITS,
    )
    launch = Launch(grid=(blocks, 1), threads=THREADS, shared_bytes=SHARED_BYTES, overlap=True)
    variant = Variant(packed.format, packed.dtype, activation, choices, tokens, cap)
    _function(variant, device)(launch, arguments, device=device)
    if y_PD is not None:
        add_choices(y_PD, weights_TK, residual_TD, out_TD)
    return out_TD


def _map_of(matrices: Matrices, rows: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Describe tiles of the weights of all experts to the copy engine."""
    columns = ROW_BYTES // matrices.data.element_size()
    described = tile_map(matrices.data.view(-1, matrices.in_features), (rows, columns))
    return TileMap(*described)


@functools.cache
def _function(variant: Variant, device: torch.device) -> Function:
    return Function(variant.source, device=device, shared_bytes=SHARED_BYTES, sm=gpu_of(device).sm)


def _supports(problem: Problem, *, activation: str) -> str | None:
    if problem.activation != activation:
        return f"for experts of the activation {activation}"
    if not problem.row_invariant:
        return "for decode rows"
    if problem.m_max > MOST_ROWS:
        return f"for M up to {MOST_ROWS}, of which few experts have more than two units"
    if problem.sm != 90:
        return "its copies are sm_90's"
    format = format_of_problem(problem)
    if format not in RESIDENT or rounds_apart(problem):
        return "for weights of 16 bits and of e4m3, of inputs with dynamic scales"
    if MOST_ROWS * problem.top_k // 8 + problem.experts > MOST_UNITS:
        return f"{problem.top_k} choices among {problem.experts} experts make more than {MOST_UNITS} units"
    if not stages_of(format, problem.n, problem.k, MOST_UNITS, choices=0, tokens=8):
        return f"rows of {max(problem.n, problem.k)} numbers leave no room for weights in shared memory"
    return triton_refusal(problem) or refusal(problem)


for _activation in ACTIVATIONS:
    register(
        Kernel(
            "experts",
            f"cuda.resident.{_activation}",
            min_sm=90,
            priority=20,
            supports=partial(_supports, activation=_activation),
            fn=partial(decode, activation=_activation),
            repack_experts=repack,
        )
    )
