"""How `stream.cu` splits a linear of few rows over a GPU: which block owns which rows of the weight and which
part of K.

The parts of K, and so the order of every sum, follow from N, K and the number of multiprocessors alone. The
number of rows M chooses only what cannot change a bit: how the parts are dealt to warps and blocks, how many
token tiles an instruction takes, where x is kept, and how deep the ring of weights is.

A block takes more than half of a multiprocessor's shared memory even where it needs less, so that two blocks
of linears never share one. Sharing lets the next linear fetch its first weights during the tail of this one,
and chains of linears alone gain by it. But a whole step loses more (docs/LOG.md has the timeline): after a
small kernel, linears then end late, probably because a launch that finds the device partly empty deals two
blocks to one multiprocessor.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from compress.errors import EnvironmentUnfit
from compress.kernels.compilers.nvrtc import Launch
from compress.kernels.linear.shape import ALONE_BYTES, TILE_ROWS, Shape
from compress.kernels.operands.gpu import Gpu

WARPS = 16
MAX_STAGES = 8
TOKEN_TILES = (1, 2, 4, 8)
"""Token tiles of 8 that one block serves; more rows take several blocks."""
RESIDENT_TOKENS = 16
"""Tokens up to which x may stay in shared memory."""
LARGE_WEIGHT = 1 << 24
"""Numbers of a weight from which stages of x leave room for more stages of weights: 16 rows of 128256 x 4096
in bfloat16 take 253 us on an H200 where x stays takes 287, 4096 x 4096 10.1 and 11.7 us, 2048 x 4096 7.2 and
6.9."""
STATIC_BYTES = 2560
"""Shared memory that the kernel declares for barriers, with a margin."""
_ALIGNMENT = 1024
_IN_FLIGHT_BYTES = 28 * 1024
"""Weight bytes that one block keeps under way, at least: 29 KB saturate the memory of an H200."""


@dataclass(frozen=True)
class Split:
    """The parts of K: `parts` for the warps of a block, over `segments` blocks."""

    parts: int
    segments: int


@dataclass(frozen=True)
class Cover:
    """Row tiles spread evenly over `row_blocks` blocks, at most `tiles` to each."""

    tiles: int
    row_blocks: int


@dataclass(frozen=True, eq=False)
class Plan:
    """One way to launch `stream.cu`, compared by identity: `plan` returns the same object for the same
    arguments. `resident`: all of x that a block needs stays in its shared memory; `arriving_bytes` of that
    memory receive sums from the cluster."""

    token_tiles: int
    tiles: int
    split: Split
    wgmma: bool
    resident: bool
    stages: int
    arriving_bytes: int
    launch: Launch

    @property
    def macros(self) -> tuple[tuple[str, int], ...]:
        """The constants of `stream.cu` that the plan decides."""
        return (("WGMMA", int(self.wgmma)), ("RESIDENT", int(self.resident)), ("STAGES", self.stages))


def num_parts_of(shape: Shape, num_sms: int) -> int:
    """Return how many parts of K are summed on their own: enough to spread the row tiles over the device,
    with enough warps to hide latency."""

    def cost(num_parts: int) -> float:
        cover = covering(shape.num_tiles, Split(num_parts, 1), num_sms)
        waves = -(-cover.row_blocks // num_sms)
        work = waves * cover.tiles * num_parts * -(-shape.k // 128 // num_parts)
        return work * (1 + 0.02 * num_parts) * (1 + 0.3 * max(0, 12 - cover.tiles * num_parts) / 12)

    return min((parts for parts in (1, 2, 4, 8) if parts == 1 or parts <= shape.k // 128), key=cost)


def covering(num_tiles: int, split: Split, num_sms: int, *, multiple: int = 1) -> Cover:
    """Spread row tiles over blocks, in numbers of tiles that are a multiple of `multiple`.

    A cluster of more than two blocks stays within one group of multiprocessors and leaves the rest of the
    group idle: on an H200, 30 clusters of four or 15 of eight run at a time, on 120 of its 132
    multiprocessors.
    """
    places = (
        num_sms // split.segments
        if split.segments <= 2
        else max(1, (num_sms - num_sms // 11) // split.segments)
    )
    fewest = -(-num_tiles // (WARPS // split.parts))
    row_blocks = min(num_tiles, -(-fewest // places) * places)
    tiles = -(-num_tiles // row_blocks)
    if tiles % multiple:
        tiles += multiple - tiles % multiple
        row_blocks = -(-num_tiles // tiles)
    return Cover(tiles, row_blocks)


@functools.cache
def plan(shape: Shape, num_rows: int, gpu: Gpu) -> Plan:
    """Return the best of `plans`.

    Raises:
        EnvironmentUnfit: a block of the device holds too little shared memory for two stages of 8 tokens.
    """
    for found in plans(shape, num_rows, gpu):
        return found
    raise EnvironmentUnfit(
        f"a linear of N = {shape.n}, K = {shape.k} and {num_rows} rows needs more than the "
        f"{gpu.shared_bytes} bytes of shared memory that a block has on this device."
    )


def plans(shape: Shape, num_rows: int, gpu: Gpu, *, wgmma: bool | None = None) -> Iterator[Plan]:
    """Yield every plan that fits the device, best first.

    `wgmma` None uses those instructions where they are faster; four-bit and e4m3 weights have `hopper.py`
    there.
    """
    num_parts = num_parts_of(shape, gpu.num_sms)
    copied = shape.format.startswith("w4") or (gpu.sm == 90 and shape.n * shape.k >= LARGE_WEIGHT)
    order = (False, True) if copied and num_rows > 8 else (True, False)
    enough = next((tiles for tiles in TOKEN_TILES if num_rows <= 8 * tiles), TOKEN_TILES[-1])
    for token_tiles in sorted((tiles for tiles in TOKEN_TILES if tiles <= enough), reverse=True):
        faster = gpu.sm == 90 and shape.format == "dense16" and 8 * token_tiles > RESIDENT_TOKENS
        by_wgmma = faster if wgmma is None else wgmma
        if by_wgmma and (token_tiles == 1 or shape.format != "dense16"):
            continue
        may_stay = order if 8 * token_tiles <= RESIDENT_TOKENS and not by_wgmma else (False,)
        for choice in ((1, 2), (4, 8)):  # segments
            for resident in may_stay:
                for split in (
                    Split(num_parts // segments, segments) for segments in choice if num_parts % segments == 0
                ):
                    found = _fit(
                        shape,
                        num_rows,
                        gpu,
                        token_tiles=token_tiles,
                        split=split,
                        wgmma=by_wgmma,
                        resident=resident,
                    )
                    if found is not None:
                        yield found


def _fit(
    shape: Shape, num_rows: int, gpu: Gpu, *, token_tiles: int, split: Split, wgmma: bool, resident: bool
) -> Plan | None:
    """Return a plan; None where shared memory holds too few stages to keep memory busy, or tiles take too
    many warps."""
    cover = covering(shape.num_tiles, split, gpu.num_sms, multiple=4 if wgmma else 1)
    clustered = gpu.sm >= 90 and split.segments > 1
    warps = cover.tiles * split.parts
    tokens = 8 * token_tiles
    num_parts = split.parts * split.segments
    real_tokens = min(num_rows, tokens)
    num_token_blocks = -(-num_rows // tokens)
    iterations = -(-(shape.k // shape.stage_k) // num_parts)
    # As stream.cu lays it out: arriving sums | x | weights; at the end sums lie over x and weights.
    own_rows = -(-cover.tiles * TILE_ROWS // split.segments)
    arriving = -(-split.segments * real_tokens * own_rows * 4 // _ALIGNMENT) * _ALIGNMENT if clustered else 0
    x_stage = split.parts * shape.stage_k * 2 * (real_tokens if resident else tokens)
    staged_fp8 = shape.format == "fp8" and not resident
    once = x_stage * iterations if resident else 2 * x_stage if staged_fp8 else 0
    each = warps * shape.tile_bytes + (0 if resident or staged_fp8 else x_stage)
    stages = min(
        (gpu.shared_bytes - STATIC_BYTES - _ALIGNMENT - arriving - once) // each, MAX_STAGES, iterations + 1
    )
    busy = stages > iterations or (stages - 1) * warps * shape.tile_bytes >= _IN_FLIGHT_BYTES
    if warps > WARPS or stages < 2 or (staged_fp8 and cover.tiles * 16 < tokens) or (resident and not busy):
        return None
    sums = split.parts * tokens * (cover.tiles * TILE_ROWS + 4) * 4
    shared_bytes = _ALIGNMENT + arriving + max(once + stages * each, sums)
    if shared_bytes > gpu.shared_bytes - STATIC_BYTES:
        return None
    launch = Launch(
        grid=(cover.row_blocks * split.segments, num_token_blocks),
        threads=warps * 32,
        shared_bytes=max(shared_bytes, ALONE_BYTES) if gpu.sm >= 90 else shared_bytes,
        cluster=split.segments if clustered else 1,
        overlap=gpu.sm >= 90,
    )
    return Plan(token_tiles, cover.tiles, split, wgmma, resident, stages, arriving, launch)
