"""Paged keys and values of one layer: pages of a fixed number of positions, in one of several formats.

    BF16, F16, F32    k and v as they are
    FP8_TOKEN_HEAD    e4m3 codes and a float32 scale a position and head, computed when it is written
    FP8_ATTENTION     as FP8_TOKEN_HEAD, each scale rounded up to a power of two
    FP8_STATIC        e4m3 codes, one given float32 scale for all keys of the layer and one for all values
    INT8_TOKEN_HEAD   codes -127..127 and scales as for FP8_TOKEN_HEAD
    INT4_TOKEN_HEAD   codes -7..7, two to a byte (even dimension in the low half, stored + 8); same scales

Slot = block id * block_size + offset. Block 0 pads block tables and belongs to no sequence. Shapes: K kv
heads, N blocks, S positions of a block, C head dimension.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from compress.kernels.operands.rows import FP8, FP8_MAX, dynamic_scale
from compress.quant.kv import FP8_ATTENTION as FP8_ATTENTION
from compress.quant.kv import FP8_STATIC as FP8_STATIC
from compress.quant.kv import FP8_TOKEN_HEAD as FP8_TOKEN_HEAD
from compress.quant.kv import INT4_TOKEN_HEAD as INT4_TOKEN_HEAD
from compress.quant.kv import INT8_TOKEN_HEAD as INT8_TOKEN_HEAD

SHORT_CONTEXT = 1024
"""Positions of a short context at most, for which attention may be spread otherwise than for longer ones."""
SECTION_KEYS = 8192
"""Positions of a section: longer contexts may be summed in sections, each by blocks of its own, so that few
requests fill a GPU (Flash-Decoding, Dao and others, 2023)."""
PADDING_BLOCK = 0
DENSE_FORMATS = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
INT_FORMATS = {torch.int8: INT8_TOKEN_HEAD, torch.uint8: INT4_TOKEN_HEAD}
TOKEN_HEAD_FORMATS = (FP8_TOKEN_HEAD, FP8_ATTENTION, *INT_FORMATS.values())
PAGE_DTYPES = {
    **{name: dtype for dtype, name in (DENSE_FORMATS | INT_FORMATS).items()},
    FP8_TOKEN_HEAD: FP8,
    FP8_ATTENTION: FP8,
    FP8_STATIC: FP8,
}
"""The dtype of the pages of each format."""
LARGEST_CODE = {FP8: FP8_MAX, torch.int8: 127.0, torch.uint8: 7.0}
CODED_FORMATS = {FP8_TOKEN_HEAD: 1, FP8_ATTENTION: 1, FP8_STATIC: 2, INT8_TOKEN_HEAD: 3, INT4_TOKEN_HEAD: 4}
"""The number of each format of codes in kernels that read them, `FORMAT`; 0 is any dense format."""
_OFFSET = 8
"""The number that is added to an INT4 code when it is stored."""


@dataclass(frozen=True)
class PagedKV:
    """One layer's pages: k and v [K, N, S, C], or [K, N, S, C / 2] bytes of INT4; scales are float32 [K, N,
    S] (per token and head), scalars (static), or None. `power_scales`: those per token and head are powers
    of two."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    power_scales: bool = field(default=False, kw_only=True)

    @property
    def block_size(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3] * (2 if self.k.dtype == torch.uint8 else 1)

    @property
    def format(self) -> str:
        if self.k_scale is None:
            return DENSE_FORMATS[self.k.dtype]
        if self.k.dtype in INT_FORMATS:
            return INT_FORMATS[self.k.dtype]
        by_token = FP8_ATTENTION if self.power_scales else FP8_TOKEN_HEAD
        return by_token if self.k_scale.dim() else FP8_STATIC

    def empty_like(self, num_blocks: int, block_size: int) -> "PagedKV":
        """Return zeroed pages of the same width and format; static scales are shared."""
        shape = (self.k.shape[0], num_blocks, block_size)
        k, v = (
            torch.zeros(*shape, pages.shape[3], dtype=pages.dtype, device=pages.device)
            for pages in (self.k, self.v)
        )
        if self.format in TOKEN_HEAD_FORMATS:
            scales = (torch.zeros(shape, dtype=torch.float32, device=k.device) for _ in range(2))
            return PagedKV(k, v, *scales, power_scales=self.power_scales)
        return PagedKV(k, v, self.k_scale, self.v_scale)

    @property
    def heads_and_width(self) -> tuple[int, int]:
        """The heads of a position and the numbers of one."""
        return self.k.shape[0], self.head_dim

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that have blocks, along axis 1: keys, values and their scales."""
        own = (self.k, self.v, self.k_scale, self.v_scale)
        return tuple(each for each in own if each is not None and each.dim() > 0)

    def write_(self, slots_T: Tensor, k_TKC: Tensor, v_TKC: Tensor) -> None:
        """Store positions, rounded to the format. This is the definition that kernels are tested against."""
        for pages, scale, new_TKC in ((self.k, self.k_scale, k_TKC), (self.v, self.v_scale, v_TKC)):
            write_pages_(pages, scale, slots_T, new_TKC.transpose(0, 1), power_scales=self.power_scales)

    def gathered(self, slots_TNK: Tensor) -> "PagedKV":
        """Return pages of the positions of these slots alone, N 1 or one choice for each KV head; those of a
        row are in blocks of their own, and K is a multiple of the positions of a block."""
        slots_NM = slots_TNK.transpose(0, 1).flatten(1)
        k, v = (_at_slots(each, slots_NM) for each in (self.k, self.v))
        scales = (
            each if each is None or not each.dim() else _at_slots(each.unsqueeze(-1), slots_NM).squeeze(-1)
            for each in (self.k_scale, self.v_scale)
        )
        return PagedKV(k, v, *scales, power_scales=self.power_scales)

    def gather(self, blocks_B: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first `length` positions of the sequence that holds `blocks_B`, each
        [K, length, C] in `dtype`."""
        blocks_B = blocks_B[: -(-length // self.block_size)]
        k, v = (
            read_pages(pages, scale, blocks_B, dtype).flatten(1, 2)[:, :length]
            for pages, scale in ((self.k, self.k_scale), (self.v, self.v_scale))
        )
        return k, v


def empty_pages(
    kv_format: str,
    shape_KNSC: tuple[int, int, int, int],
    device: torch.device | str = "cpu",
    *,
    static_scales: tuple[float, float] = (1.0, 1.0),
) -> PagedKV:
    """Return zeroed pages of a format; `static_scales` are those of keys and of values in FP8_STATIC."""
    (*slots, head_dim) = shape_KNSC
    stored = head_dim // 2 if kv_format == INT4_TOKEN_HEAD else head_dim
    k, v = (torch.zeros(*slots, stored, dtype=PAGE_DTYPES[kv_format], device=device) for _ in "kv")
    if kv_format in TOKEN_HEAD_FORMATS:
        scales = (torch.zeros(slots, dtype=torch.float32, device=device) for _ in "kv")
        return PagedKV(k, v, *scales, power_scales=kv_format == FP8_ATTENTION)
    if kv_format == FP8_STATIC:
        return PagedKV(
            k, v, *(torch.tensor(each, dtype=torch.float32, device=device) for each in static_scales)
        )
    return PagedKV(k, v)


def write_pages_(
    pages_KNSC: Tensor,
    scale: Tensor | None,
    slots_T: Tensor,
    new_KTC: Tensor,
    *,
    power_scales: bool = False,
) -> None:
    """Store heads of positions in pages, rounded to their format, and their scales unless those are given."""
    if scale is not None:
        new_f32 = new_KTC.to(torch.float32)
        if scale.dim():
            scale_KT = dynamic_scale(new_f32, LARGEST_CODE[pages_KNSC.dtype])
            scale_KT = power_of_two(scale_KT) if power_scales else scale_KT
            scale.view(scale.shape[0], -1).index_copy_(1, slots_T, scale_KT)
        else:
            scale_KT = scale
        new_KTC = _codes(new_f32 / scale_KT.unsqueeze(-1), pages_KNSC.dtype)
    flat = pages_KNSC.view(pages_KNSC.shape[0], -1, pages_KNSC.shape[3])
    if flat.dtype == FP8:  # index_copy_ knows no 8-bit floats; their bytes it does
        flat = flat.view(torch.uint8)
        new_KTC = new_KTC.view(torch.uint8)
    flat.index_copy_(1, slots_T, new_KTC.to(flat.dtype))


def read_pages(pages_KNSC: Tensor, scale: Tensor | None, blocks_B: Tensor, dtype: torch.dtype) -> Tensor:
    """Return these blocks of pages in `dtype`, [K, B, S, C]."""
    scales = scale.index_select(1, blocks_B) if scale is not None and scale.dim() else scale
    return dequantized(_select(pages_KNSC, blocks_B), scales, dtype)


def power_of_two(scale: Tensor) -> Tensor:
    """Return positive normal float32 numbers rounded up to powers of two."""
    mantissa = (1 << 23) - 1
    powers = ((scale.view(torch.int32) + mantissa) & ~mantissa).view(torch.float32)
    return torch.where(scale.isnan(), scale, powers)


def dequantized(pages_KNSC: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Convert pages to `dtype`; the product with the scale is taken in float32."""
    if scale is None:
        return pages_KNSC.to(dtype)
    if pages_KNSC.dtype == torch.uint8:
        pages_KNSC = (
            torch.stack((pages_KNSC & 15, pages_KNSC >> 4), dim=-1).flatten(-2).to(torch.int8) - _OFFSET
        )
    return (pages_KNSC.to(torch.float32) * (scale.unsqueeze(-1) if scale.dim() else scale)).to(dtype)


def _codes(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the nearest codes, ties to even, in the layout of the pages."""
    largest = LARGEST_CODE[dtype]
    clamped = scaled.clamp(-largest, largest)
    if dtype == FP8:
        return clamped.to(FP8)
    codes = clamped.round().to(torch.int8)
    if dtype == torch.int8:
        return codes
    even, odd = (codes + _OFFSET).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return even | odd << 4


def _at_slots(pages_KNSC: Tensor, slots_NM: Tensor) -> Tensor:
    """Return the blocks of these slots of each head [K, M / S, S, C]."""
    num_heads, num_blocks, block_size, _ = pages_KNSC.shape
    first_K1 = torch.arange(num_heads, device=slots_NM.device).unsqueeze(1) * (num_blocks * block_size)
    whole = pages_KNSC.view(torch.uint8).flatten(0, 2)
    rows = whole.index_select(0, (first_K1 + slots_NM).flatten()).view(pages_KNSC.dtype)
    return rows.view(num_heads, -1, block_size, rows.shape[-1])


def _select(pages_KNSC: Tensor, blocks_B: Tensor) -> Tensor:
    if pages_KNSC.dtype == FP8:
        return pages_KNSC.view(torch.uint8).index_select(1, blocks_B).view(FP8)
    return pages_KNSC.index_select(1, blocks_B)
