"""Decode linears on Hopper's warpgroup instructions, four-bit and e4m3 weights: plans and launches `hopper.cu`, which says how it sums.

A row's bits are the same in every M and beside any neighbours: units of the weight and parts of K follow from N and the number of
multiprocessors alone. M chooses how many tokens an instruction takes, how deep the ring is, and whether blocks prepare raw rows themselves.
"""

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.build.nvrtc import Function, Launch, Source, tile_map
from compress.kernels.linear.plan import FORMATS, TILE_BYTES, Format, Gpu, Shape
from compress.kernels.linear.stream import (
    ACTIVATIONS,
    QUANTIZES,
    Quantizes,
    Streamed,
    gpu_of,
    partial_tile,
    prepare_rows,
    quantizes_of,
    raw_arguments,
    readable,
    source_text,
    x_map,
)
from compress.kernels.operands.rows import QuantizedRows, RawRows
from compress.kernels.select import Problem

TOKEN_TILES = (1, 2, 4, 8)
"""Tiles of 8 tokens that one instruction takes; more rows take several blocks."""
MAX_TILES = 16
"""Row tiles of 16 in a unit: four warpgroups of 64 rows."""
MAX_STAGES = 16
_CHUNK = 128
_ALIGNMENT = 1024
_STATIC_BYTES = 2048
"""Of shared memory that the kernel declares for barriers and sums of squares, and to spare."""
_ALONE_BYTES = 117 * 1024
"""Of shared memory for a block, at least: no two blocks of linears share a multiprocessor (plan.py says why)."""
_CLUSTER_TILES = 4
"""Row tiles up to which two blocks share the chunks of a unit of as many: one with half as many rows would read memory more slowly, and
all of x."""
_SHORT = 8
"""Chunks of a part up to which two of them on their way are best, else four (H200, 8B shapes, M = 1 to 64): with fewer, memory waits for
requests; with all that the ring holds, the first comes late (`docs/LOG.md`)."""
_KEEP = 8
"""Chunks of 8 numbers of a raw row that a thread keeps, at most. Blocks prepare a single row alone: from two rows on, a kernel of its own
is as quick."""


@dataclass(frozen=True)
class Plan:
    """Macros and arguments of the kernel: `tiles` row tiles of 16 make a unit, `places` chunks of 128 columns a stage; a unit and
    `8 * token_tiles` tokens make an item. At most `window` stages are on their way at a time. `keep`: blocks prepare the raw row
    themselves, and a thread keeps so many chunks of it."""

    token_tiles: int
    tiles: int
    k_slots: int
    segments: int
    places: int
    stages: int
    window: int
    num_items: int
    token_blocks: int
    inbox_bytes: int
    x_bytes: int
    keep: int | None
    launch: Launch

    @property
    def row_groups(self) -> int:
        return row_groups_of(self.tiles)

    @property
    def parts(self) -> int:
        """Of K, each summed on its own."""
        return self.k_slots * self.segments


def row_groups_of(tiles: int) -> int:
    """Warpgroups along the rows."""
    return -(-tiles // 4)


def k_slots_of(tiles: int) -> int:
    """Warpgroups along K: what four in a block leave."""
    return {1: 4, 2: 2}.get(row_groups_of(tiles), 1)


def unit_of(shape: Shape, num_sms: int) -> tuple[int, int]:
    """Row tiles of a unit, and the blocks that share its chunks: so that every multiprocessor has as much, and few none."""
    each = -(-shape.num_tiles // num_sms)
    if 2 * each <= _CLUSTER_TILES:
        return 2 * each, 2
    return -(-each // -(-each // MAX_TILES)), 1


@functools.cache
def plan(shape: Shape, num_rows: int, gpu: Gpu, *, raw: bool = False) -> Plan:
    """The first of `plans`, of which there is always one."""
    return next(plans(shape, num_rows, gpu, raw=raw))


def plans(shape: Shape, num_rows: int, gpu: Gpu, *, raw: bool = False) -> Iterator[Plan]:
    """Every way to serve so many rows, best first; none changes a bit. `raw`: blocks prepare the rows where that is quick."""
    keep = _kept_of(shape, gpu) if raw and num_rows == 1 else None
    if keep is not None:
        yield _filled(shape, num_rows, gpu, TOKEN_TILES[0], keep=keep)
    enough = next(
        (token_tiles for token_tiles in TOKEN_TILES if num_rows <= 8 * token_tiles), TOKEN_TILES[-1]
    )
    for token_tiles in reversed(TOKEN_TILES):
        if token_tiles <= enough:
            yield _filled(shape, num_rows, gpu, token_tiles)


def _kept_of(shape: Shape, gpu: Gpu) -> int | None:
    """Chunks of a raw row to a thread; None where they are too many for registers."""
    keep = -(-shape.k // (8 * _consumers_of(unit_of(shape, gpu.num_sms)[0])))
    return keep if keep <= _KEEP else None


def _consumers_of(tiles: int) -> int:
    """Threads of a block that multiply."""
    return row_groups_of(tiles) * k_slots_of(tiles) * 128


def _filled(shape: Shape, num_rows: int, gpu: Gpu, token_tiles: int, *, keep: int | None = None) -> Plan:
    tiles, segments = unit_of(shape, gpu.num_sms)
    k_slots = k_slots_of(tiles)
    tokens = 8 * token_tiles
    parts = k_slots * segments
    units = -(-shape.num_tiles // tiles)
    token_blocks = -(-num_rows // tokens)
    num_items = units * token_blocks
    num_chunks = shape.k // _CHUNK
    deep = 2 if shape.format != "fp8" and token_tiles <= 4 else 1
    steps = _rounds(_rounds(num_chunks, 2 * k_slots), segments) * (2 // deep)
    # As hopper.cu lays it out: inbox | raw row | ring. The last warpgroup reads past its tiles.
    tile_bytes = TILE_BYTES[shape.format]
    row_bytes = 1 if shape.format == "fp8" else 2
    inbox_bytes = 0 if segments == 1 else _aligned(tokens * tiles * 8 * 4)
    x_bytes = 0 if keep is None else _aligned(shape.k * row_bytes)
    places = deep * k_slots
    around = _ALIGNMENT + inbox_bytes + x_bytes + (row_groups_of(tiles) * 4 - tiles) * places * tile_bytes
    stage_bytes = _aligned(
        places * (tiles * tile_bytes + (tokens * _CHUNK * row_bytes if keep is None else 0))
    )
    blocks = (
        min(num_items, gpu.num_sms) if parts == 1 else num_items * segments
    )  # sums of parts lie where the ring was: one item a block
    in_all = steps * -(-num_items * segments // blocks)
    stages = min(MAX_STAGES, (gpu.shared_bytes - _STATIC_BYTES - around) // stage_bytes, in_all)
    window = min(stages, (2 if num_chunks <= _SHORT * parts else 4) // deep)
    sums_bytes = 0 if parts == 1 else k_slots * tokens * (tiles * 16 + 4) * 4
    launch = Launch(
        grid=(blocks, 1),
        threads=_consumers_of(tiles) + (32 if shape.format == "fp8" else 128),
        shared_bytes=max(around + max(stages * stage_bytes, sums_bytes), _ALONE_BYTES),
        cluster=segments,
        overlap=True,
    )
    return Plan(
        token_tiles,
        tiles,
        k_slots,
        segments,
        places,
        stages,
        window,
        num_items,
        token_blocks,
        inbox_bytes,
        x_bytes,
        keep,
        launch,
    )


def _rounds(total: int, each: int) -> int:
    return -(-total // each)


def _aligned(num_bytes: int) -> int:
    return _rounds(num_bytes, _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for."""

    format: Format
    dtype: torch.dtype
    activation: str | None
    float32_output: bool
    token_tiles: int
    row_groups: int
    k_slots: int
    segments: int
    keep: int | None = None
    normed: bool = False
    quantizes: Quantizes = "no"

    @property
    def source(self) -> Source:
        macros = {
            "FORMAT": FORMATS.index(self.format),
            "F16": int(self.dtype == torch.float16),
            "ACT": ACTIVATIONS.index(self.activation),
            "OUT32": int(self.float32_output),
            "NT": self.token_tiles,
            "ROW_GROUPS": self.row_groups,
            "K_SLOTS": self.k_slots,
            "SEGMENTS": self.segments,
            "NORM": int(self.normed),
            "QUANT": QUANTIZES.index(self.quantizes),
            "RAW": int(self.keep is not None),
            "KEEP": self.keep or 1,
            **{"WGMMA": 1, "RESIDENT": 1, "STAGES": 2},  # of pieces.cuh
        }
        return Source(
            source_text("numbers.cuh", "pieces.cuh", "hopper.cu"), "hopper_linear", tuple(macros.items())
        )


_TileMap = ctypes.c_ubyte * 128


class _Arguments(ctypes.Structure):
    """`Args` of hopper.cu."""

    _fields_ = [
        *((name, _TileMap) for name in ("w_map", "x_map")),
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
                "num_items",
                "token_blocks",
                "inbox_bytes",
                "x_bytes",
            )
        ),
        ("norm_eps", ctypes.c_float),
    ]


def multiply(
    x: Tensor | QuantizedRows | RawRows,
    weight: Streamed,
    bias_O: Tensor | None,
    *,
    dtype: torch.dtype,
    activation: str | None,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    chosen: Plan | None = None,
) -> Tensor:
    """[T, O], or [T, O / 2] when gated: rounded to `dtype`, the model's, then the residual added and rounded again; or float32.

    `chosen` is for measuring other plans than the best; none of them changes a bit.
    """
    num_rows = x.shape[0]
    device = weight.data.device
    n = weight.n
    k = weight.k
    shape = Shape(weight.format, n, k, activation is not None)
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
        rows_map = x_map(x_TI, 8 * chosen.token_tiles, chosen.places * _CHUNK)
    norm_weight, static_scale, eps = raw_arguments(raw)
    pointers = (
        None if tensor is None else tensor.data_ptr()
        for tensor in (weight.scale_O, scale_T, bias_O, residual_TO, y_TO, raw_TI)
    )
    arguments = _Arguments(
        _TileMap(*_weight_map(weight, chosen, shape.gated)),
        _TileMap(*rows_map),
        *(*pointers, norm_weight, static_scale),
        *(
            num_rows,
            n,
            k,
            chosen.tiles,
            chosen.stages,
            chosen.window,
            chosen.num_items,
            chosen.token_blocks,
            chosen.inbox_bytes,
            chosen.x_bytes,
            eps,
        ),
    )
    function(variant_of(chosen, shape, dtype, activation, out_dtype, raw=raw), device)(
        chosen.launch, arguments, device=device
    )
    return y_TO


def refusal(problem: Problem) -> str | None:
    return "its instructions are sm_90's alone" if problem.sm != 90 else partial_tile(problem)


def variant_of(
    chosen: Plan,
    shape: Shape,
    dtype: torch.dtype,
    activation: str | None,
    out_dtype: torch.dtype | None,
    *,
    raw: RawRows | None = None,
) -> Variant:
    return Variant(
        shape.format, dtype, activation, out_dtype == torch.float32, chosen.token_tiles, chosen.row_groups, chosen.k_slots, chosen.segments,
        chosen.keep, normed=raw is not None and raw.weight_K is not None, quantizes=quantizes_of(raw),
    )  # fmt: skip


def _weight_map(weight: Streamed, chosen: Plan, gated: bool) -> bytes:
    """Of the row tiles of a unit, in the chunks of a stage; of e4m3 gated: each 8 gate rows over their 8 up rows."""
    tiles = chosen.tiles
    places = chosen.places
    if weight.format != "fp8":
        return tile_map(
            weight.data.view(torch.int64), (tiles, places, weight.data.shape[-1] // 8), swizzled=False
        )
    if not gated:
        return tile_map(weight.data.unflatten(1, (-1, _CHUNK)).transpose(0, 1), (places, 16 * tiles, _CHUNK))
    return tile_map(
        weight.data.view(2, -1, 8, weight.k // _CHUNK, _CHUNK).permute(3, 1, 0, 2, 4),
        (places, tiles, 2, 8, _CHUNK),
    )


@functools.cache
def function(variant: Variant, device: torch.device) -> Function:
    """The variant, compiled and loaded: once for a device."""
    gpu = gpu_of(device)
    return Function(variant.source, device=device, shared_bytes=gpu.shared_bytes - _STATIC_BYTES, sm=gpu.sm)
