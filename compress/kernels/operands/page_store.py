"""Keys and values written to the pages of a cache, for Triton kernels: in the pages' dtype, or as codes with
a scale a token and head, with the bits of `PagedKV.write_`.

`FORMAT` is the number of a format in `paged.CODED_FORMATS`, 0 for a dense one. A head comes as its two
halves.
"""

from compress.kernels.compilers.triton import jit, tl
from compress.kernels.operands.e4m3 import encode_e4m3


@jit()
def store_heads(
    pages_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    heads: tl.tensor,
    slot: tl.tensor,
    static_scale: tl.tensor,
    head_stride: tl.tensor,
    scale_stride: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    columns: tl.tensor,
    mask: tl.tensor,
    C: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    TINY_SCALE: tl.constexpr,
    POWERS: tl.constexpr,
) -> None:
    """Write halves [h, C / 2] of the given heads to one slot of the pages, as `PagedKV.write_` does."""
    STORED: tl.constexpr = C // 2 if FORMAT == 4 else C
    at = pages_ptr + heads * head_stride + slot * STORED
    if FORMAT != 0:
        first = first.to(tl.float32)
        second = second.to(tl.float32)
        real_head = tl.max(mask.to(tl.int32), axis=1, keep_dims=True) > 0
        if FORMAT == 2:
            scale = static_scale + tl.zeros_like(first)
        else:
            absmax = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1, keep_dims=True)
            scale = tl.maximum(tl.div_rn(absmax, LARGEST + tl.zeros_like(absmax)), TINY_SCALE)
            if POWERS:
                scale = _power_of_two(scale)
            tl.store(scale_ptr + heads * scale_stride + slot, scale, mask=real_head)
        first = tl.minimum(tl.maximum(tl.div_rn(first, scale + tl.zeros_like(first)), -LARGEST), LARGEST)
        second = tl.minimum(tl.maximum(tl.div_rn(second, scale + tl.zeros_like(second)), -LARGEST), LARGEST)
        if FORMAT == 4:
            pairs = tl.arange(0, columns.shape[1] // 2)[None, :]
            tl.store(at + pairs, _nibbles(first), mask=real_head & (pairs < C // 4))
            tl.store(at + C // 4 + pairs, _nibbles(second), mask=real_head & (pairs < C // 4))
        elif FORMAT == 3:
            tl.store(at + columns, nearest(first).to(tl.uint8), mask=mask)
            tl.store(at + C // 2 + columns, nearest(second).to(tl.uint8), mask=mask)
        else:
            tl.store(at + columns, encode_e4m3(first), mask=mask)
            tl.store(at + C // 2 + columns, encode_e4m3(second), mask=mask)
    else:
        tl.store(at + columns, first.to(pages_ptr.dtype.element_ty), mask=mask)
        tl.store(at + C // 2 + columns, second.to(pages_ptr.dtype.element_ty), mask=mask)


@jit()
def _power_of_two(scale: tl.tensor) -> tl.tensor:
    """Return positive numbers rounded up to powers of two; NaN stays."""
    bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return tl.where(scale == scale, bits.to(tl.float32, bitcast=True), scale)


@jit()
def nearest(x: tl.tensor) -> tl.tensor:
    """Return the nearest integers of small float32 numbers, ties to even, in the low byte of int32."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) & 0xFF  # 1.5 2^23: the sum does the rounding


@jit()
def _nibbles(x: tl.tensor) -> tl.tensor:
    """Return four-bit codes [h, n] as bytes [h, n / 2], the even one in the low half, each + 8."""
    codes = (nearest(x) + 8) & 0xF
    even, odd = tl.split(tl.reshape(codes, [x.shape[0], x.shape[1] // 2, 2]))
    return (even | (odd << 4)).to(tl.uint8)
