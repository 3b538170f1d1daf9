"""Codes of a quantized cache as factors of a product, for Triton kernels: every second dimension of a key or
value at once, those with an even number or those with an odd one.

    FORMAT 1, 2    e4m3, two codes to an int16 (`e4m3.py`)
    FORMAT 3       integers -127 .. 127, two codes to an int16
    FORMAT 4       integers -7 .. 7, two to a byte, stored + 8

An integer is stored as u = code + OFFSET, or becomes it by one bit. An unsigned integer in the low bits of a
16-bit float is that subnormal number: u 2^-133 in bfloat16 (where 128 to 255 are the next binade and just as
right), u 2^-24 in float16, which is used for float32, too. The caller makes up for the offset:
sum (u - OFFSET) x = sum u x - OFFSET sum x.
"""

from compress.kernels.compilers.triton import jit, tl
from compress.kernels.operands.e4m3 import decode_even, decode_odd


@jit()
def load_queries(at: tl.tensor, mask: tl.tensor, scale: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """Load queries for products with pages. Return (q, q_odd, logit scale with log2 e, factor of p, factor
    of the result).

    Pages without scales (FORMAT 0) take q as it is. Pages of codes take even and odd dimensions apart, as
    `even_codes` and `odd_codes` return keys. The factors cancel the power of two that a wider float reads
    into a code: in bfloat16 each factor of a product gets a part of it, so that none is subnormal.
    """
    q = tl.load(at, mask=mask, other=0.0)
    logit_scale = scale * 1.4426950408889634
    if FORMAT == 0:
        return q, q, logit_scale, 1.0, 1.0
    else:
        q_odd = tl.load(at + 1, mask=mask, other=0.0)
        half = 1152921504606846976.0  # 2^60
        if FORMAT > 2 and q.dtype is not tl.bfloat16:
            return q, q_odd, logit_scale * 16777216.0, 1.0, 16777216.0  # 2^24
        elif q.dtype is tl.float16:
            return q, q_odd, logit_scale * 256.0, 1.0, 256.0
        else:
            rest = half * 8192.0 if FORMAT > 2 else half  # 2^73
            q, q_odd = (q.to(tl.float32) * half).to(q.dtype), (q_odd.to(tl.float32) * half).to(q.dtype)
            return q, q_odd, logit_scale * rest, half, rest


@jit()
def even_codes(
    codes: tl.tensor, DTYPE: tl.constexpr, FORMAT: tl.constexpr, INTERPRETED: tl.constexpr
) -> tl.tensor:
    """Return the codes of even dimensions in DTYPE, integers with their offset."""
    if FORMAT == 3:
        return _unsigned((codes ^ 0x80) & 0xFF, DTYPE)
    elif FORMAT == 4:
        return _unsigned(codes & 0xF, DTYPE)
    else:
        return decode_even(codes, DTYPE, INTERPRETED).to(DTYPE)


@jit()
def odd_codes(
    codes: tl.tensor, DTYPE: tl.constexpr, FORMAT: tl.constexpr, INTERPRETED: tl.constexpr
) -> tl.tensor:
    """Return the codes of odd dimensions in DTYPE, integers with their offset."""
    if FORMAT == 3:
        return _unsigned(((codes >> 8) ^ 0x80) & 0xFF, DTYPE)
    elif FORMAT == 4:
        return _unsigned(codes >> 4, DTYPE)
    else:
        return decode_odd(codes, DTYPE, INTERPRETED).to(DTYPE)


@jit()
def offset_sum(terms: tl.tensor, DTYPE: tl.constexpr, FORMAT: tl.constexpr) -> tl.tensor:
    """Return what the offsets of integer codes add to their products with rows of these terms, float32
    [rows, 1]."""
    OFFSET: tl.constexpr = 128.0 if FORMAT == 3 else 8.0
    total = tl.sum(terms.to(tl.float32), axis=1)[:, None] * OFFSET
    if DTYPE is tl.bfloat16:
        return (
            total * 8.470329472543003e-22 * 1.0842021724855044e-19
        )  # 2^-70 2^-63: their product is subnormal
    else:
        return total * 5.9604644775390625e-08  # 2^-24


@jit()
def _unsigned(codes: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Return small unsigned integers as subnormal numbers."""
    return codes.to(tl.int16).to(tl.bfloat16 if DTYPE is tl.bfloat16 else tl.float16, bitcast=True).to(DTYPE)
