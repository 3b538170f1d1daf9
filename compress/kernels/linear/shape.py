"""The facts of a decode linear that plans depend on: the format and shape of its weight."""

from dataclasses import dataclass
from typing import Literal, get_args

Format = Literal["dense16", "w4", "w4_asym", "fp8", "fp8_block", "w4a8", "w4a8_wide", "int8"]
FORMATS: tuple[Format, ...] = get_args(Format)
TILE_ROWS = 16
TILE_BYTES: dict[Format, int] = {
    "dense16": 2048,
    "fp8": 2048,
    "fp8_block": 2112,
    "w4": 1056,
    "w4_asym": 1088,
    "w4a8": 1056,
    "w4a8_wide": 1056,
    "int8": 2048,
}
"""Bytes of one row tile in one stage."""
ALONE_BYTES = 117 * 1024
"""Least shared memory of a block on Hopper: two such blocks do not fit on one multiprocessor
(`stream_plan.py` has the reason)."""


@dataclass(frozen=True)
class Shape:
    """A weight of n rows (gate over up when gated) and k columns."""

    format: Format
    n: int
    k: int
    gated: bool

    @property
    def num_tiles(self) -> int:
        """Tiles of 16 rows; for a gated linear, 8 gate rows over their 8 up rows."""
        return -(-(self.n // 2) // 8) if self.gated else -(-self.n // TILE_ROWS)

    @property
    def e4m3(self) -> bool:
        """Whether weights and rows are e4m3 codes."""
        return self.format in ("fp8", "fp8_block")

    @property
    def eight_bits(self) -> bool:
        """Whether weights and rows are codes of eight bits."""
        return self.e4m3 or self.format == "int8"

    @property
    def four_bits(self) -> bool:
        """Whether weights are packed codes of four bits."""
        return self.format.startswith("w4")

    @property
    def row_bytes(self) -> int:
        """Bytes of a number of a row."""
        return 1 if self.eight_bits or self.format.startswith("w4a8") else 2

    @property
    def stage_k(self) -> int:
        """Columns in one stage."""
        return 64 if self.format == "dense16" else 128
