"""The tiles of experts of decode rows that are products in slices (`slices.py`). They change no bit.

All items of a product take about as long, so a product takes as long as the waves of them: a multiprocessor
has some items under way at once, and what is left of the last wave is lost. Which tile loses least follows
from the number of items. The times of a wave were fitted, with gates, to sweeps of 20 shapes of today's
models in `W4A16_G128` on one H200 at 1 to 64 rows (`scripts/bench_experts.py --sweep`).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from compress.kernels.experts.launch import MAX_PAIRED_ROWS
from compress.kernels.experts.packed import PackedExperts
from compress.kernels.operands.gpu import Gpu
from compress.kernels.operands.matrices import IN_WORDS
from compress.kernels.operands.slices import ITEMS, STATIC_BYTES, Tile, steps_of, variant_of

FEW_CHOICES = 16
MAX_PAIRED_ROWS_OF_MANY = 2
"""Rows of more than `FEW_CHOICES` whose pairs are units of their own."""
DOWN_OF_MANY = Tile(1, 1, 2, 1, 1, staged=True)
"""The tile of down with a warp for each of many choices."""
FEW_ROWS = 32
MOST_WARPS = 32
"""Warps of a block."""
OUTPUTS = 16
"""Outputs of a tile."""
LONG = 32
"""Steps of a sum that is long for gate and up of more than `FEW_ROWS`."""
LONG_DOWN = 40
"""Steps of a sum that is long for down of rows that are sorted."""
CROWDED = 8
"""Mean rows of an expert above which a unit has 16 rows: units of 8 would read the weights twice."""
OF_CROWDED = Tile(2, 2, 1, 3, 1)
"""The tile of both products where experts have more than `CROWDED` rows; weights that are not in words have
it up to 256 rows. In 17 cases of seven gated shapes in four bits with 9 to 46 rows an expert it is at most
7 % slower than the best of 37 pairs of tiles, 2 % on average. Compared with tiles that follow the rows of a
step alone, 54 cases of 12 shapes in four bits with 8 to 512 rows take 11 % less on average, and at most 2 %
more. Weights of eight bits lose by it above 256 rows; they also lose by units of 8 rows above 64."""
OF_PAIRS = Tile(1, 1, 1, 3, 8)
OF_FEW_ROWS = Tile(2, 1, 1, 4, 1)
"""The tiles of gate and up of weights that are not in words."""


@dataclass(frozen=True)
class Wave:
    """How many tiles of `OUTPUTS` a multiprocessor has under way at once, of down how many warps, and how
    long that takes, in us: a part that is fixed, and one for each step of a sum."""

    at_once: int
    fixed_us: float
    step_us: float

    def us(self, items: float, at_once: int, steps: int) -> float:
        """Return how long a multiprocessor takes for so many tiles, some of them at once."""
        return max(1, math.ceil(items / at_once)) * (self.fixed_us + self.step_us * steps)


GATE_UP_OF_PAIRS = {
    OF_PAIRS: Wave(3, 1.26, 0.07),
    Tile(1, 1, 1, 4, 4): Wave(4, 1.43, 0.11),
    Tile(1, 1, 1, 5, 4): Wave(5, 1.18, 0.14),
    Tile(2, 1, 2, 2, 4, staged=True): Wave(6, 2.13, 0.13),
    Tile(1, 1, 2, 3, 8, staged=True): Wave(3, 2.30, 0.03),
    Tile(2, 1, 2, 3, 2, staged=True): Wave(10, 2.36, 0.22),
    Tile(2, 1, 1, 3, 2, staged=True): Wave(14, 2.30, 0.38),
    Tile(2, 1, 2, 3, 1, staged=True): Wave(24, 1.66, 0.53),
}
"""Tiles of gate and up where every pair is a unit of its own."""
UP_OF_PAIRS = (
    (3, OF_PAIRS),
    (5, Tile(2, 1, 2, 2, 8, staged=True)),
    (10, Tile(2, 1, 2, 2, 4, staged=True)),
    (math.inf, Tile(2, 1, 2, 3, 2, staged=True)),
)
"""Tiles of up without a gate where every pair is a unit of its own, each with the most items of `OUTPUTS` of
a multiprocessor for which it is taken. Of nine shapes in `W4A16_G64` at 1, 2 and 4 rows, measured as the
others, the tile taken is at most 10 % slower than the best of seven in all experts of a layer, and 1.4 % on
average."""
GATE_UP_OF_FEW_ROWS = {
    Tile(1, 1, 1, 5, 1): Wave(20, 2.00, 0.31),
    Tile(1, 1, 1, 6, 1): Wave(24, 2.62, 0.34),
    OF_FEW_ROWS: Wave(32, 0.41, 0.58),
    Tile(2, 1, 2, 2, 4, staged=True): Wave(2, 1.00, 0.0),
    Tile(1, 1, 2, 4, 1, staged=True): Wave(16, 2.18, 0.20),
}
"""Tiles of gate and up of up to `FEW_ROWS`, sorted by expert. Of a tile with many waves only the time of
all was fitted: the 2 of the staged one with four warps is no count. With groups of less than 128, which were
not fitted, staged tiles were a tenth slower than the others (gpt-oss-20b at 24 and 32 rows)."""
DOWN_OF_PAIRS = {
    Tile(1, 1, 1, 1, 4): Wave(24, 2.12, 0.13),
    Tile(1, 1, 2, 1, 4, staged=True): Wave(32, 2.66, 0.12),
    Tile(1, 1, 2, 2, 2, staged=True): Wave(24, 2.24, 0.24),
    Tile(2, 1, 2, 1, 2, staged=True): Wave(20, 3.51, 0.25),
    Tile(1, 1, 3, 2, 1, staged=True): Wave(20, 1.49, 0.39),
    Tile(1, 1, 6, 1, 1, staged=True): Wave(12, 1.46, 0.35),
    Tile(2, 1, 2, 2, 1, staged=True): Wave(20, 1.55, 0.61),
    Tile(1, 1, 2, 3, 1, staged=True): Wave(48, 1.92, 0.78),
}
"""Tiles of down where every pair is a unit of its own. A block has the warps of all choices of a token, and
`at_once` counts warps."""


def is_paired(packed: PackedExperts, num_rows: int, top_k: int, gpu: Gpu) -> bool:
    """Return whether every pair is a unit of its own."""
    if top_k <= FEW_CHOICES:
        return num_rows <= MAX_PAIRED_ROWS
    if num_rows > MAX_PAIRED_ROWS_OF_MANY or top_k > MOST_WARPS:
        return False
    return shared_bytes(packed, DOWN_OF_MANY, top_k) <= gpu.shared_bytes - STATIC_BYTES


def tiles_of(packed: PackedExperts, num_rows: int, top_k: int, gpu: Gpu) -> tuple[Tile, Tile]:
    """Return the tiles of gate and up, and of down."""
    if is_paired(packed, num_rows, top_k, gpu):
        return _gate_up_of_pairs(packed, num_rows * top_k, gpu), _down_of_pairs(packed, num_rows, top_k, gpu)
    crowded = num_rows * top_k > CROWDED * packed.num_experts
    if packed.format not in IN_WORDS and (num_rows > 256 or (num_rows > 64 and not crowded)):
        row_tiles = 2 if num_rows <= 256 else 4
        return Tile(1 if packed.gated else 2, row_tiles, 1, 3, 1), Tile(2, row_tiles, 1, 3, 1)
    if crowded:
        return OF_CROWDED, OF_CROWDED
    hit = packed.num_experts * -math.expm1(-num_rows * top_k / packed.num_experts)
    down = _down_of_sorted(packed, num_rows, hit, gpu)
    if packed.gated:
        return _gate_up_of_sorted(packed, num_rows, hit, gpu), down
    return Tile(2, 1, 1, 5 if num_rows <= FEW_ROWS else 6, 1), down


def _gate_up_of_pairs(packed: PackedExperts, num_pairs: int, gpu: Gpu) -> Tile:
    if packed.format not in IN_WORDS:
        return OF_PAIRS
    if not packed.gated:
        items = -(-packed.gate_up.out_features // OUTPUTS) * num_pairs / gpu.num_sms
        return next(tile for most, tile in UP_OF_PAIRS if items <= most)
    return _fastest(GATE_UP_OF_PAIRS, packed, num_pairs, gpu)


def _gate_up_of_sorted(packed: PackedExperts, num_rows: int, hit: float, gpu: Gpu) -> Tile:
    if num_rows > FEW_ROWS:
        return OF_FEW_ROWS if steps_of(packed.gate_up) >= LONG else Tile(1, 1, 1, 6, 1)
    if packed.format not in IN_WORDS:
        return OF_FEW_ROWS
    small = packed.gate_up.group_size < 128
    waves = {tile: wave for tile, wave in GATE_UP_OF_FEW_ROWS.items() if not (small and tile.staged)}
    return _fastest(waves, packed, hit, gpu)


def _down_of_sorted(packed: PackedExperts, num_rows: int, hit: float, gpu: Gpu) -> Tile:
    if num_rows > FEW_ROWS:
        return Tile(2, 1, 1, 6, 1)
    if steps_of(packed.down) > LONG_DOWN:
        return Tile(1, 1, 1, 4, 4)
    blocks = packed.down.out_features / (2 * OUTPUTS * ITEMS) * hit / gpu.num_sms
    return Tile(2, 1, 1, 6 if math.ceil(blocks / 6) < math.ceil(blocks / 5) else 5, 1)


def _fastest(waves: Mapping[Tile, Wave], packed: PackedExperts, units: float, gpu: Gpu) -> Tile:
    """Return the tile of gate and up that takes the shortest time for so many units."""
    items = -(-packed.gate_up.out_features // (2 * OUTPUTS)) * units / gpu.num_sms
    steps = steps_of(packed.gate_up)
    return min(waves, key=lambda tile: waves[tile].us(items, waves[tile].at_once, steps))


def _down_of_pairs(packed: PackedExperts, num_rows: int, top_k: int, gpu: Gpu) -> Tile:
    """Return the tile of down that takes the shortest time, of those whose blocks there are."""
    if top_k > FEW_CHOICES:
        return DOWN_OF_MANY
    items = -(-packed.down.out_features // OUTPUTS) * num_rows / gpu.num_sms
    steps = steps_of(packed.down)

    fitting = _fitting(packed, top_k, gpu.shared_bytes - STATIC_BYTES)
    return min(
        fitting,
        key=lambda tile: DOWN_OF_PAIRS[tile].us(items, downs_at_once(tile, top_k), steps),
        default=Tile(1, 1, 1, 2, 1),
    )


def downs_at_once(tile: Tile, top_k: int) -> int:
    """Return how many tiles of down a multiprocessor has under way at once."""
    return max(1, DOWN_OF_PAIRS[tile].at_once // (top_k * tile.parts)) * tile.output_tiles


def _fitting(packed: PackedExperts, top_k: int, room: int) -> Iterator[Tile]:
    """Yield the tiles of `DOWN_OF_PAIRS` whose blocks have enough warps and shared memory."""
    for tile in DOWN_OF_PAIRS:
        if top_k * tile.parts <= MOST_WARPS and shared_bytes(packed, tile, top_k) <= room:
            yield tile


def shared_bytes(packed: PackedExperts, tile: Tile, top_k: int) -> int:
    """Return the bytes of shared memory of down where every pair is a unit of its own."""
    variant = variant_of(
        packed.down,
        tile,
        dtype=packed.dtype,
        activation=None,
        out_dtype=packed.dtype,
        rows="by pair",
        choices=top_k,
    )
    return variant.shared_bytes(steps_of(packed.down))
