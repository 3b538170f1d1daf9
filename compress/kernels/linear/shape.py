"""The facts of a decode linear that plans depend on: the format and shape of its weight."""

from dataclasses import dataclass
from typing import Literal

Format = Literal["dense16", "w4", "w4_asym", "fp8", "fp8_block", "int8"]
FORMATS: tuple[Format, ...] = ("dense16", "w4", "w4_asym", "fp8", "fp8_block", "int8")
TILE_ROWS = 16
TILE_BYTES = {"dense16": 2048, "fp8": 2048, "fp8_block": 2112, "int8": 2048, "w4": 1056, "w4_asym": 1088}
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
        return self.format in ("w4", "w4_asym")

    @property
    def stage_k(self) -> int:
        """Columns in one stage."""
        return 64 if self.format == "dense16" else 128
