"""How `hopper.cu` splits a linear of few rows over a GPU: units of the weight, parts of K and the ring of
stages; and how it takes the rows of a prompt (`prompt_plan`), whose bits may depend on their number.

Units of the weight and parts of K follow from N and the number of multiprocessors alone, so a row's bits are
the same in every M. M chooses how many tokens an instruction takes, how deep the ring is, and whether blocks
prepare raw rows themselves.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from compress.kernels.compilers.nvrtc import Launch
from compress.kernels.linear.shape import ALONE_BYTES, Shape
from compress.kernels.operands.gpu import Gpu

TOKEN_TILES = (1, 2, 4, 8)
"""Tiles of 8 tokens that one instruction takes; more rows take several blocks."""
MOST_TOKEN_TILES = 16
"""Tiles of a block that reads its weights once for 128 tokens: of prompts, and of decode rows unless weights
need the registers to become numbers."""
_STAGES_OF_MOST = {True: 2, False: 3}
"""Stages of such a block at least, of weights of 8 bits and of 16: products of the latter are still under way
in one stage while the next begins, so that two leave nothing to load into."""
MAX_TILES = 16
"""Row tiles of 16 in a unit: four warpgroups of 64 rows."""
MAX_STAGES = 16
PROMPT_CHUNK = 128
_ALIGNMENT = 1024
STATIC_BYTES = 3072
"""Shared memory that the kernel declares for barriers and sums of squares, with a margin."""
_CLUSTER_TILES = 4
"""Row tiles up to which two blocks share the chunks of a unit. A block with half as many rows of its own
would read memory more slowly, and all of x."""
_SHORT = 8
"""Chunks of a part up to which two copies in flight are best, else four (H200, 8B shapes, M = 1 to 64): with
fewer, memory waits for requests; with as many as the ring holds, the first arrives late (`docs/LOG.md`). Up
to 32 rows of 16 bits want four, and blocks of 128 tokens of e4m3 three (scratch sweeps, no result file)."""
PROMPT_TILES = {8: 1.0, 12: 1.32}
"""Row tiles of a unit for prompts, and the time of an item (of 4,096 columns 26 and 34 us on an H200): three
warpgroups read x less often, two leave fewer multiprocessors without work where the weight is narrow."""
REGISTERS = {4: 112, 3: 160, 2: 240}
"""Registers of a thread that multiplies, by the warpgroups of its block that do, where they trade registers
with the copying group. With its own they are nearly all that a multiprocessor has."""
_KEEP = 8
"""Most chunks of 8 numbers of a raw row that a thread keeps. Blocks prepare only a single row: from two rows
on, a kernel of its own is as quick."""


@dataclass(frozen=True, eq=False)
class Plan:
    """One way to launch `hopper.cu`, compared by identity (`plan` returns the same object for the same
    arguments): `tiles` row tiles of 16 make a unit, `places` chunks of columns a stage, and a unit
    with `8 * token_tiles` tokens an item. At most `window` stages are in flight, but for those asked for
    before the kernel before has ended, which are all with `fills`. With `keep`, blocks prepare the raw row
    themselves, and a thread keeps that many chunks of it. `prompts`: the macro PROMPTS, 0 for decode rows."""

    token_tiles: int
    tiles: int
    k_slots: int
    segments: int
    places: int
    stages: int
    window: int
    fills: bool
    num_items: int
    token_blocks: int
    inbox_bytes: int
    x_bytes: int
    scale_bytes: int
    keep: int | None
    launch: Launch
    prompts: int = 0

    @property
    def row_groups(self) -> int:
        return row_groups_of(self.tiles)

    @property
    def parts(self) -> int:
        """Parts of K, each summed on its own."""
        return self.k_slots * self.segments

    @property
    def macros(self) -> tuple[tuple[str, int], ...]:
        """The constants of `hopper.cu` that the plan decides, and those of `pieces.cuh`."""
        return (
            ("ROW_GROUPS", self.row_groups),
            ("K_SLOTS", self.k_slots),
            ("SEGMENTS", self.segments),
            ("RAW", int(self.keep is not None)),
            ("PROMPTS", self.prompts),
            ("REGISTERS", REGISTERS[self.row_groups * self.k_slots]),
            ("KEEP", self.keep or 1),
            *(("WGMMA", 1), ("RESIDENT", 1), ("STAGES", 2)),
        )


def row_groups_of(tiles: int) -> int:
    """Return the number of warpgroups along the rows."""
    return -(-tiles // 4)


def k_slots_of(tiles: int) -> int:
    """Return the number of warpgroups along K: a block has four, less those along the rows."""
    return {1: 4, 2: 2}.get(row_groups_of(tiles), 1)


def unit_of(shape: Shape, num_sms: int) -> tuple[int, int]:
    """Return the row tiles of a unit and how many blocks share its chunks, so that the multiprocessors have
    equal work."""
    each = -(-shape.num_tiles // num_sms)
    if 2 * each <= _CLUSTER_TILES:
        return 2 * each, 2
    return -(-each // -(-each // MAX_TILES)), 1


@functools.cache
def plan(shape: Shape, num_rows: int, gpu: Gpu, *, raw: bool = False) -> Plan:
    """Return the best of `plans`, of which there is always one."""
    return next(plans(shape, num_rows, gpu, raw=raw))


def plans(shape: Shape, num_rows: int, gpu: Gpu, *, raw: bool = False) -> Iterator[Plan]:
    """Yield every plan for so many rows, best first; no plan changes a bit. With `raw`, blocks prepare the
    rows where that is quick, and elsewhere a launch does so before the linear."""
    keep = _kept_of(shape, gpu) if raw and num_rows == 1 else None
    if keep is not None:
        yield _filled(shape, num_rows, gpu, TOKEN_TILES[0], keep=keep)
    choices = TOKEN_TILES if shape.widened else (*TOKEN_TILES, MOST_TOKEN_TILES)
    enough = next((token_tiles for token_tiles in choices if num_rows <= 8 * token_tiles), choices[-1])
    for token_tiles in reversed(choices):
        if token_tiles <= enough:
            found = _filled(shape, num_rows, gpu, token_tiles, prepared=raw)
            if token_tiles < MOST_TOKEN_TILES or found.stages >= _STAGES_OF_MOST[shape.eight_bits]:
                yield found


@functools.cache
def prompt_plan(shape: Shape, num_rows: int, gpu: Gpu, *, tiles: int | None = None) -> Plan:
    """Return the plan for rows of a prompt and four-bit weights: units of those row tiles that leave the
    least work to the last round of the multiprocessors, or of as many as are given, for measuring."""
    tokens = 8 * MOST_TOKEN_TILES
    token_blocks = -(-num_rows // tokens)

    def time_of(tiles: int) -> float:
        items = -(-shape.num_tiles // tiles) * token_blocks
        return -(-items // gpu.num_sms) * PROMPT_TILES[tiles]

    tiles = tiles or min(PROMPT_TILES, key=time_of)
    num_items = -(-shape.num_tiles // tiles) * token_blocks
    x_bytes = tokens * PROMPT_CHUNK * shape.row_bytes
    around = _ALIGNMENT + (row_groups_of(tiles) * 4 - tiles) * shape.tile_bytes
    stage_bytes = _aligned(tiles * shape.tile_bytes + x_bytes)
    stages = min(MAX_STAGES, (gpu.shared_bytes - STATIC_BYTES - around) // stage_bytes)
    blocks = min(num_items, gpu.num_sms)
    launch = Launch(
        grid=(blocks, 1),
        threads=row_groups_of(tiles) * 128 + 128,
        shared_bytes=around + stages * stage_bytes,
        cluster=1,
        overlap=True,
    )
    return Plan(
        token_tiles=MOST_TOKEN_TILES,
        tiles=tiles,
        k_slots=1,
        segments=1,
        places=1,
        stages=stages,
        window=stages,
        fills=False,
        num_items=num_items,
        token_blocks=token_blocks,
        inbox_bytes=0,
        x_bytes=0,
        scale_bytes=0,
        keep=None,
        launch=launch,
        prompts=2 if shape.gated else 1,
    )


def _kept_of(shape: Shape, gpu: Gpu) -> int | None:
    """Return how many chunks of a raw row a thread keeps; None where they are too many for registers, and
    where a row is rounded in groups."""
    if shape.format == "fp8_block":
        return None
    keep = -(-shape.k // (8 * _consumers_of(unit_of(shape, gpu.num_sms)[0])))
    return keep if keep <= _KEEP else None


def _consumers_of(tiles: int) -> int:
    """Return how many threads of a block multiply."""
    return row_groups_of(tiles) * k_slots_of(tiles) * 128


def _filled(
    shape: Shape,
    num_rows: int,
    gpu: Gpu,
    token_tiles: int,
    *,
    keep: int | None = None,
    prepared: bool = False,
) -> Plan:
    """Return the plan of that many token tiles, its ring as deep as shared memory holds. `prepared`: a launch
    between this one and the linear before it prepares the rows.

    While such a launch runs memory is idle, and the ring may fill: by e4m3 rows always, by others where all
    of a narrow unit lies in the ring. Elsewhere rows of 16 bits would come later (`docs/LOG.md`).
    """
    tiles, segments = unit_of(shape, gpu.num_sms)
    k_slots = k_slots_of(tiles)
    tokens = 8 * token_tiles
    parts = k_slots * segments
    units = -(-shape.num_tiles // tiles)
    token_blocks = -(-num_rows // tokens)
    num_items = units * token_blocks
    num_chunks = shape.k // shape.stage_k
    deep = 2 if shape.four_bits and token_tiles <= 4 else 1
    trades_registers = (shape.four_bits and token_tiles > 2) or (
        shape.e4m3 and token_tiles == MOST_TOKEN_TILES
    )
    steps = _rounds(_rounds(num_chunks, 2 * k_slots), segments) * (2 // deep)
    # As hopper.cu lays it out: inbox | raw row | scales of x | ring. The last warpgroup reads past its tiles.
    tile_bytes = shape.tile_bytes
    row_bytes = shape.row_bytes
    inbox_bytes = 0 if segments == 1 else _aligned(tokens * tiles * 8 * 4)
    x_bytes = 0 if keep is None else _aligned(shape.k * row_bytes)
    scale_bytes = _aligned(num_chunks * tokens * 4) if shape.format == "fp8_block" else 0
    places = deep * k_slots
    fixed = _ALIGNMENT + inbox_bytes + x_bytes + scale_bytes
    around = fixed + (row_groups_of(tiles) * 4 - tiles) * places * tile_bytes
    stage_bytes = _aligned(
        places * (tiles * tile_bytes + (tokens * shape.stage_k * row_bytes if keep is None else 0))
    )
    blocks = (
        min(num_items, gpu.num_sms) if parts == 1 else num_items * segments
    )  # sums of parts lie where the ring was: one item a block
    in_all = steps * -(-num_items * segments // blocks)
    stages = min(MAX_STAGES, (gpu.shared_bytes - STATIC_BYTES - around) // stage_bytes, in_all)
    is_short = num_chunks <= _SHORT * parts and (shape.format != "dense16" or tokens > 32)
    in_flight = 3 if shape.eight_bits and token_tiles == MOST_TOKEN_TILES else 2 if is_short else 4
    window = min(stages, in_flight // deep)
    four_by_eight = shape.four_bits and shape.row_bytes == 1
    fills = prepared and (four_by_eight or (segments == 1 and k_slots > 1))
    sums_bytes = 0 if parts == 1 else k_slots * tokens * (tiles * 16 + 4) * 4
    launch = Launch(
        grid=(blocks, 1),
        threads=_consumers_of(tiles) + (128 if trades_registers else 32),
        shared_bytes=max(around + max(stages * stage_bytes, sums_bytes), ALONE_BYTES),
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
        fills,
        num_items,
        token_blocks,
        inbox_bytes,
        x_bytes,
        scale_bytes,
        keep,
        launch,
    )


def _rounds(total: int, each: int) -> int:
    return -(-total // each)


def _aligned(num_bytes: int) -> int:
    return _rounds(num_bytes, _ALIGNMENT) * _ALIGNMENT
