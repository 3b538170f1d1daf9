"""Products of bfloat16 numbers on a CPU whose tiles (AMX) multiply them several times as fast as its vectors
multiply float32.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@functools.cache
def has_bfloat16_tiles() -> bool:
    """Return whether this CPU multiplies bfloat16 several times as fast as float32."""
    return bool(torch.cpu._is_amx_tile_supported()) and torch.backends.mkldnn.is_available()


@contextmanager
def bfloat16_factors() -> Iterator[None]:
    """Let float32 products on a CPU take their factors as bfloat16 within the block, which loses nothing
    where they are bfloat16 numbers."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # set up when the module is loaded
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16" if has_bfloat16_tiles() else before
    try:
        yield
    finally:
        matmul.fp32_precision = before
