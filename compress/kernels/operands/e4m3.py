"""e4m3 (arXiv 2209.05433) in integer arithmetic, for Triton kernels: the same on every GPU, also those
without the format, and on the CPU.

    code = s eeee mmm        value = +-2^(e - 7) (1 + m / 8), or +-2^-6 m / 8 for e = 0

A code's magnitude, shifted to the mantissa of a wider float, is that float times a power of two,
subnormals included: bfloat16 (8 bits of exponent, biased by 127) reads value * 2^-120, float16 (5 bits,
biased by 15) value * 2^-8. Rounding to e4m3 is one instruction from sm_89 on (`converts_e4m3`).
"""

import torch

from compress.kernels.compilers.triton import FP8_SM, INTERPRETED, interpreted, jit, tl
from compress.kernels.problem import compute_capability


@jit()
def encode_e4m3(x: tl.tensor) -> tl.tensor:
    """Return uint8 codes of float32 values within +-448, rounded to nearest, ties to even."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # Exponents are biased by 127 here and by 7 there; a carry out of the mantissa raises the exponent, as it
    # should.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # In [2^14, 2^15) a float32 counts in steps of 2^-9, the least e4m3 subnormal: the sum does the rounding.
    subnormal = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    return (tl.where(magnitude < 0x3C800000, subnormal, normal) | sign).to(tl.uint8)


@jit()
def decode_even(pairs: tl.tensor, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr) -> tl.tensor:
    """Return the low code of each int16 pair as bfloat16 times 2^-120, or as float16 times 2^-8."""
    if INTERPRETED:
        return _widened(pairs & 0xFF, DTYPE)
    elif DTYPE is tl.float16:
        return tl.inline_asm_elementwise(
            "{.reg .b32 s, m; shl.b32 s, $1, 8; shl.b32 m, $1, 7; and.b32 s, s, 0x80008000; "
            "lop3.b32 $0, m, 0x3F803F80, s, 0xEA;}",
            "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b32 s, m; shl.b32 s, $1, 8; shl.b32 m, $1, 4; and.b32 s, s, 0x80008000; "
            "lop3.b32 $0, m, 0x07F007F0, s, 0xEA;}",
            "=r,r", [pairs], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip


@jit()
def decode_odd(pairs: tl.tensor, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr) -> tl.tensor:
    """Return the high code of each int16 pair as bfloat16 times 2^-120, or as float16 times 2^-8."""
    if INTERPRETED:
        return _widened((pairs >> 8) & 0xFF, DTYPE)
    elif DTYPE is tl.float16:
        return tl.inline_asm_elementwise(
            "{.reg .b32 s, m; and.b32 s, $1, 0x80008000; "
            "shr.u32 m, $1, 1; lop3.b32 $0, m, 0x3F803F80, s, 0xEA;}",
            "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b32 s, m; and.b32 s, $1, 0x80008000; "
            "shr.u32 m, $1, 4; lop3.b32 $0, m, 0x07F007F0, s, 0xEA;}",
            "=r,r", [pairs], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip


@jit()
def e4m3_values(codes: tl.tensor) -> tl.tensor:
    """Return the float32 values of uint8 codes."""
    return (
        _widened(codes.to(tl.int16), tl.bfloat16).to(tl.float32) * 1329227995784915872903807060280344576.0
    )  # 2^120


@jit()
def e4m3_float16(codes: tl.tensor) -> tl.tensor:
    """Return the float16 values of uint8 codes."""
    return _widened(codes.to(tl.int16), tl.float16) * 256.0


@jit()
def _widened(codes: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Return int16 codes as bfloat16 times 2^-120, or as float16 times 2^-8, one element at a time."""
    SHIFT: tl.constexpr = 7 if DTYPE is tl.float16 else 4
    bits = (((codes & 0x80) << 8) | ((codes & 0x7F) << SHIFT)).to(tl.int16)
    return bits.to(tl.float16 if DTYPE is tl.float16 else tl.bfloat16, bitcast=True)


def converts_e4m3(device: torch.device) -> bool:
    """Return whether the device has an instruction that converts to e4m3."""
    return compute_capability(device) >= FP8_SM and not interpreted()


@jit()
def larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """NaN if either is: a broken row must not look sound."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit()
def group_scale(parts: tl.tensor) -> tl.tensor:
    """Return the scale of each row of float32 numbers; NaN if one of them is."""
    return larger(tl.div_rn(tl.reduce(tl.abs(parts), 1, larger), 448.0), 1 / (1 << 40))  # TINY_SCALE


@jit()
def quotient(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return x / scale, rounded once, in a fifth of the time of a general division, where no number is
    infinite: with the correctly rounded 1 / scale, one step of correction gives the correctly rounded
    quotient (Markstein, IBM J. Res. Dev. 34, 1990). Quotients whose residual underflows may be off; they are
    far below the grids of codes."""
    if INTERPRETED:  # where a fused sum is rounded twice
        return tl.div_rn(x, scale + tl.zeros_like(x))
    else:
        inverse = tl.div_rn(1.0, scale)
        about = x * inverse
        excess = tl.fma(about, scale, -x)  # its negative would lose the sign of -0
        return tl.fma(excess, -inverse, about)


@jit()
def e4m3(x: tl.tensor, scale: tl.tensor, CONVERTS: tl.constexpr, BOUNDED: tl.constexpr = False) -> tl.tensor:
    """Return codes of x / scale as bytes, x and scale in float32; values beyond 448 saturate. None is, but
    for its rounding, if BOUNDED."""
    if CONVERTS:
        if not BOUNDED:  # 449 is 448 on the grid
            x = tl.minimum(tl.maximum(x, -449.0 * scale), 449.0 * scale)
        return quotient(x, scale).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return encode_e4m3(tl.minimum(tl.maximum(tl.div_rn(x, scale), -448.0), 448.0))
