"""The facts of a decode linear that plans depend on: the format and shape of its weight."""

from dataclasses import dataclass
from typing import Literal, get_args

Format = Literal["dense16", "w4", "w4_asym", "fp8", "fp8_block", "w4a8", "w4a8_wide", "int8", "fp4", "w8"]
FORMATS: tuple[Format, ...] = get_args(Format)
FOUR_BITS: tuple[Format, ...] = ("w4", "w4_asym", "w4a8", "w4a8_wide", "fp4")
TILE_ROWS = 16
CODE_BYTES: dict[Format, int] = {
    "dense16": 2048,
    "w4": 1024,
    "w4_asym": 1024,
    "fp8": 2048,
    "fp8_block": 2048,
    "w4a8": 1024,
    "w4a8_wide": 1024,
    "int8": 2048,
    "fp4": 1024,
    "w8": 2048,
}
"""Bytes of numbers or codes of one row tile in one stage."""
SCALE_BYTES: dict[Format, int] = {
    "w4": 32,
    "w4_asym": 64,
    "fp8_block": 64,
    "w4a8": 32,
    "w4a8_wide": 32,
    "fp4": 32,
}
"""Bytes of its scales and zero points, for each scale group of a stage."""
ALONE_BYTES = 117 * 1024
"""Least shared memory of a block on Hopper: two such blocks do not fit on one multiprocessor
(`stream_plan.py` has the reason)."""


@dataclass(frozen=True)
class Shape:
    """A weight of n rows (gate over up when gated) and k columns; `subgroups` scale groups of four-bit
    weights are in 128 columns, one where a group is as long or longer."""

    format: Format
    n: int
    k: int
    gated: bool
    subgroups: int = 1

    @property
    def num_tiles(self) -> int:
        """Tiles of 16 rows; for a gated linear, 8 gate rows over their 8 up rows."""
        return -(-(self.n // 2) // 8) if self.gated else -(-self.n // TILE_ROWS)

    @property
    def tile_bytes(self) -> int:
        """Bytes of one row tile in one stage."""
        return CODE_BYTES[self.format] + SCALE_BYTES.get(self.format, 0) * self.subgroups

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
        return self.format in FOUR_BITS

    @property
    def widened(self) -> bool:
        """Whether weights become numbers of the rows' type in registers."""
        return self.four_bits or self.format == "w8"

    @property
    def row_bytes(self) -> int:
        """Bytes of a number of a row."""
        return 1 if self.eight_bits or self.format.startswith("w4a8") else 2

    @property
    def stage_k(self) -> int:
        """Columns in one stage."""
        return 64 if self.format == "dense16" else 128
