"""Formats of a KV cache by name, and the calibrated scales of the one that has them.

    DENSE                            keys and values in the dtype that the model computes in
    FP8_STATIC                       e4m3 with one float32 scale for all keys of a layer and one for all its
                                     values, found by calibration and stored with the layer's weights
    FP8_, INT8_, INT4_TOKEN_HEAD     one float32 scale for each position and head, computed when it is written
    INT4_TOKEN_HEAD_HADAMARD         the same pages; queries, keys (after rope) and values are replaced by the
                                     Hadamard transform of their head (`kernels/hadamard/`)
    FP8_ATTENTION                    as FP8_TOKEN_HEAD, and each scale is a power of two, so that prefill
                                     attention can multiply the codes in FP8 under one scale for many
                                     positions (`kernels/attention_prefill/fp8_reference.py`)

A calibrated scale is a scalar of the layer under the names of `KV_SCALES`: value ~ e4m3(value / scale) *
scale. `kernels/operands/paged.py` has the memory layout of the pages.
"""

import torch
from torch import Tensor

from compress.errors import UnsupportedFormat, UsageError, did_you_mean
from compress.quant.scheme import FP8_MAX

KV_DENSE = "DENSE"
"""Format of a cache that is not quantized."""
FP8_STATIC = "FP8_STATIC"
FP8_TOKEN_HEAD = "FP8_TOKEN_HEAD"
INT8_TOKEN_HEAD = "INT8_TOKEN_HEAD"
INT4_TOKEN_HEAD = "INT4_TOKEN_HEAD"
FP8_ATTENTION = "FP8_ATTENTION"
HADAMARD = "_HADAMARD"
INT4_HADAMARD = INT4_TOKEN_HEAD + HADAMARD
HADAMARD_HEAD_DIMS = (64, 128, 256)
"""Head dimensions that are transformed."""
KV_CACHES = {
    "fp8": FP8_STATIC,
    "fp8_token_head": FP8_TOKEN_HEAD,
    "fp8_attention": FP8_ATTENTION,
    "int8": INT8_TOKEN_HEAD,
    "int4": INT4_TOKEN_HEAD,
    "int4_hadamard": INT4_HADAMARD,
}
"""Recipe names of the formats."""
KV_SCALES = {"k": "attn.k_scale", "v": "attn.v_scale"}
"""Names of the scales of keys and of values among a layer's parameters."""


def kv_cache_named(name: str) -> str:
    """Return the format that a recipe names.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in KV_CACHES:
        raise UsageError(f"unknown KV cache '{name}'.{did_you_mean(name, KV_CACHES)}")
    return KV_CACHES[name]


def page_format(kv_format: str) -> str:
    """Return the format of the pages, which does not tell whether heads are transformed."""
    return kv_format.removesuffix(HADAMARD)


def transforms_heads(kv_format: str) -> bool:
    """Return whether heads are in their Hadamard transform."""
    return kv_format.endswith(HADAMARD)


def round_to_e4m3(x: Tensor) -> Tensor:
    """Return the nearest e4m3 number as float32, ties to even, saturating: e4m3 has no infinity, and an
    overflow would become NaN."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(torch.float32)


def read_kv_scale(stored: Tensor, name: str) -> Tensor:
    """Return a scale of a checkpoint, [] or [1] in any dtype, as a float32 scalar.

    Raises:
        UnsupportedFormat: it is several numbers, or one that is not finite and positive.
    """
    if stored.numel() != 1 or not bool(torch.isfinite(stored).all()) or float(stored) <= 0:
        raise UnsupportedFormat(
            f"'{name}' is not one positive number, which the scale of all keys or values of a layer must be."
        )
    return stored.to(torch.float32).reshape(())
