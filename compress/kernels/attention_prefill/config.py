"""Shapes of the Triton prefill attention's tiles, by head and dtype."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Config:
    """Rows (query tokens times G) and keys of a tile, warps, tiles of keys in flight."""

    rows: int
    tile: int
    num_warps: int
    stages: int


def config_of(head_dim: int, dtype: torch.dtype) -> Config:
    """Return a configuration, which fits the shared memory of sm_80 (163 KiB) too."""
    if dtype == torch.float32 and head_dim > 256:
        return Config(rows=16, tile=16, num_warps=4, stages=2)
    if dtype == torch.float32:
        return Config(rows=32, tile=32, num_warps=4, stages=2)
    if head_dim > 256:
        return Config(rows=32, tile=32, num_warps=4, stages=2)
    if head_dim > 128:
        return Config(rows=64, tile=32, num_warps=4, stages=2)
    return Config(rows=64, tile=64, num_warps=4, stages=3)
