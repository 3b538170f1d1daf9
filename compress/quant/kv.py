"""Formats of a KV cache by name, and the one scale that is not found as positions are written: the calibrated one.

    FP8_STATIC                          e4m3, one float32 scale for all keys of a layer and one for all values, kept with its weights
    FP8_, INT8_, INT4_TOKEN_HEAD        one float32 scale for each position and head, found when it is written: nothing to calibrate

How pages hold them is `kernels/operands/paged.py`'s. Scales are scalars of a layer under
`KV_SCALES`: value ~ e4m3(value / scale) * scale.
"""

import torch
from torch import Tensor

from compress.errors import UnsupportedFormat, UsageError, did_you_mean
from compress.quant.scheme import FP8_MAX

DENSE = "DENSE"
"""Keys and values as they are, in the dtype that the model computes in."""
FP8_STATIC = "FP8_STATIC"
FP8_TOKEN_HEAD = "FP8_TOKEN_HEAD"
INT8_TOKEN_HEAD = "INT8_TOKEN_HEAD"
INT4_TOKEN_HEAD = "INT4_TOKEN_HEAD"
KV_CACHES = {
    "fp8": FP8_STATIC,
    "fp8_token_head": FP8_TOKEN_HEAD,
    "int8": INT8_TOKEN_HEAD,
    "int4": INT4_TOKEN_HEAD,
}
"""What a recipe calls them."""
KV_SCALES = {"k": "attn.k_scale", "v": "attn.v_scale"}


def kv_cache_named(name: str) -> str:
    """The format that a recipe means.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in KV_CACHES:
        raise UsageError(f"unknown KV cache '{name}'.{did_you_mean(name, KV_CACHES)}")
    return KV_CACHES[name]


def round_to_e4m3(x: Tensor) -> Tensor:
    """float32, to the nearest, ties to even, saturating: e4m3 has no infinity, and an overflow would become NaN."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(torch.float32)


def read_kv_scale(stored: Tensor, name: str) -> Tensor:
    """A scale of a checkpoint, [] or [1] in any dtype, as a float32 scalar.

    Raises:
        UnsupportedFormat: it is several numbers, or none that anything can be divided by.
    """
    if stored.numel() != 1 or not bool(torch.isfinite(stored).all()) or float(stored) <= 0:
        raise UnsupportedFormat(
            f"'{name}' is not one positive number, as the scale of all keys or values of a layer has to be."
        )
    return stored.to(torch.float32).reshape(())
