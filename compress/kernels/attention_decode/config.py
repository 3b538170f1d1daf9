"""The constants of the paged Triton decode attention, by head dimension."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Config:
    """The constants of the kernel: the bits depend on `chunk`, `tile`, `merge_chunks` and the warps, only
    the time on `stages` and `programs`."""

    chunk: int = 128
    tile: int = 64
    merge_chunks: int = 16
    merge_warps: int = 1
    num_warps: int = 4
    stages: int = 3
    programs: int = 1056


CONFIG = Config()


def config_of(head_dim: int, dtype: torch.dtype) -> Config:
    """Return the configuration of a head dimension; tiles of wide heads are smaller, so that those in flight
    fit the shared memory of sm_80 (163 KiB)."""
    if head_dim * dtype.itemsize <= 2 * 256:
        return CONFIG
    if head_dim * dtype.itemsize <= 4 * 256:
        return replace(CONFIG, tile=32, stages=2)
    return replace(CONFIG, tile=16, stages=2)
