"""Decode linear of integer weights of at most four bits (W4A16, and W3A16 and W2A16 in nibbles): codes stay
four bits until they reach the tensor cores.

Packed layout: one block for each tile of 16 rows and 128 columns, blocks of a tile in a row: 1024 bytes of
codes, 16 scales, and for an asymmetric scheme 16 offsets. Groups of 64 or 32 columns have two or four times
as many of both; those of longer groups, or of a channel, are repeated. A 32-bit word is the eight codes
that one thread feeds to one m16n8k16 instruction: register j (rows g, g + 8, g, g + 8 and columns 2 t, 2
t, 2 t + 8, 2 t + 8 for j = 0..3, lane = 4 g + t) takes nibbles j and 4 + j. Codes are stored + 8, and
offsets as -(136 + zero point), in float16 -(1032 + zero point): what is added to a number whose last bits are
a code, as those of 128 + code are in bfloat16. Words of steps 0..3 of a lane are neighbours, then words of
steps 4..7. Scales and offsets are stored as pairs (row g, row g + 8), those of a pair's groups side by side.
A tile of a gated linear holds 8 gate rows over the matching 8 up rows.

The product is exact on integers within a group; the group's sum is scaled in float32. So weights are not
rounded to bfloat16 first, as the reference (and every consumer that dequantizes) does: the difference is
within that rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.linear.coded import coded, stacked_codes
from compress.kernels.linear.decode_kernels import decode_kernels, for_packed
from compress.kernels.linear.hopper import multiply, refusal
from compress.kernels.linear.launch import KernelWeight
from compress.kernels.linear.shape import Format, Shape
from compress.kernels.linear.stream import stream
from compress.kernels.select import anything, register
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme

BLOCK = 128
"""Columns of a block."""
TILE = 16
CODE_BYTES = 1024
VECTOR_BYTES = 32
"""Bytes in a block of one 16-bit number for each of its rows; `CODE_BYTES` are those of its codes."""
CODES_AT_ONCE = 1 << 25
"""Codes that are packed at a time: each takes some 40 bytes on the way."""
SUBGROUPS = (1, 2, 4)
"""Scale groups of a block."""
OFFSETS = {torch.bfloat16: 128, torch.float16: 1024}
"""The number that the bit trick adds to a code, by dtype."""


@dataclass(frozen=True)
class PackedW4:
    """Blocks uint8 [tiles, k / 128, bytes] of n rows (padded to whole tiles) and k columns. Codes of e2m1
    (`fp4.py`) have `outer_O`, float32, which outputs are multiplied by."""

    blocks: Tensor
    n: int
    k: int
    dtype: torch.dtype
    symmetric: bool
    gated: bool
    subgroups: int = 1
    outer_O: Tensor | None = None

    @property
    def kernel_weight(self) -> KernelWeight:
        integers: Format = "w4" if self.symmetric else "w4_asym"
        given: Format = integers if self.outer_O is None else "fp4"
        return KernelWeight(given, self.blocks, self.n, self.k, self.outer_O, subgroups=self.subgroups)


def tile_rows(n: int, *, gated: bool) -> Tensor:
    """Return which row is at [tile, 0..15]; rows n and above are padding."""
    tiles = Shape("w4", n, BLOCK, gated).num_tiles
    if not gated:
        return torch.arange(tiles * TILE).view(tiles, TILE)
    gate = torch.arange(tiles * 8).view(tiles, 8)
    gate = torch.where(gate < n // 2, gate, n)
    return torch.cat((gate, torch.where(gate < n, gate + n // 2, n)), dim=1)


def repack(
    weights: Sequence[Tensor | QuantizedWeight], *, dtype: torch.dtype, device: torch.device, gated: bool
) -> PackedW4:
    """Stack weights along O and pack them in blocks; scales are rounded to the compute dtype, which is the
    stored one unless a model is converted."""
    quantized = coded(weights)
    symmetric = quantized[0].scheme.symmetric
    codes_OI = stacked_codes(quantized, device)
    scale_OG = torch.cat([weight.scale_OG.to(device) for weight in quantized]).to(dtype)
    zeros = [weight.zero_point_OG for weight in quantized]
    zero_OG = None if symmetric else torch.cat([zero.to(device) for zero in zeros if zero is not None])
    n, k = codes_OI.shape
    subgroups = subgroups_of(quantized[0].scheme)

    def repeated(values_OG: Tensor) -> Tensor:
        return values_OG.repeat_interleave(k // BLOCK * subgroups // values_OG.shape[1], dim=1)

    vectors = [repeated(scale_OG)]
    if zero_OG is not None:
        vectors.append(repeated(-(OFFSETS[dtype] + 8 + zero_OG.to(torch.float32)).to(dtype)))
    blocks = pack_blocks(codes_OI, vectors, _words, gated=gated)
    return PackedW4(blocks, n, k, dtype, symmetric, gated, subgroups)


def subgroups_of(scheme: Scheme) -> int:
    """Return the scale groups of a block."""
    return 1 if scheme.group_size is None else max(1, BLOCK // scheme.group_size)


def pack_blocks(
    codes_OI: Tensor, vectors: Sequence[Tensor], words: Callable[[Tensor], Tensor], *, gated: bool
) -> Tensor:
    """Pack codes, and vectors [O, G] of 16-bit numbers, in blocks. `words` makes a word, as int64, of the
    last eight codes of a tensor."""
    n, k = codes_OI.shape
    real = tile_rows(n, gated=gated).flatten().clamp(max=n - 1).to(codes_OI.device)
    at_once = max(CODES_AT_ONCE // k // TILE, 1) * TILE
    return torch.cat(
        [_pack_rows(codes_OI[part], [each[part] for each in vectors], words) for part in real.split(at_once)]
    )


def _pack_rows(codes: Tensor, vectors: Sequence[Tensor], words: Callable[[Tensor], Tensor]) -> Tensor:
    """Pack the rows of some tiles."""
    tiles = len(codes) // TILE
    blocks = codes.shape[1] // BLOCK
    # Row = 8 high_row + g; column = 64 half + 16 step + 8 high_column + 2 t + odd.
    split = codes.to(torch.int64).view(tiles, 2, 8, blocks, 2, 4, 2, 4, 2)
    ordered = split.permute(
        0, 3, 4, 2, 7, 5, 8, 6, 1
    )  # tile, block, half, g, t, step, odd, high_column, high_row
    packed = words(ordered.reshape(tiles, blocks, 2, 32, 4, 8))
    signed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
    bytes_of_codes = signed.view(torch.uint8).view(tiles, blocks, CODE_BYTES)
    pairs = [row_pairs(each.view(tiles, TILE, blocks, -1)) for each in vectors]
    return torch.cat([bytes_of_codes, *pairs], dim=-1)


def _words(codes: Tensor) -> Tensor:
    """Return words of nibbles 4 odd + 2 high_column + high_row."""
    return ((codes + 8) << 4 * torch.arange(8, device=codes.device)).sum(dim=-1)


def row_pairs(values: Tensor) -> Tensor:
    """Pack 16-bit numbers [tiles, 16, blocks, subgroups] to bytes [tiles, blocks, 32 subgroups]: row g next
    to row g + 8."""
    tiles, _, blocks, subgroups = values.shape
    pairs = values.view(tiles, 2, 8, blocks, subgroups).permute(0, 3, 2, 4, 1).contiguous()
    return pairs.view(torch.uint8).view(tiles, blocks, subgroups * VECTOR_BYTES)


def unpack(packed: PackedW4) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes int8 [O, I], scales [O, G] and zero points int8 [O, G] or None, of G groups of at most 128
    columns: the inverse of `repack`."""
    tiles, groups, _ = packed.blocks.shape
    size = packed.subgroups * VECTOR_BYTES
    words = packed.blocks[..., :CODE_BYTES].contiguous().view(torch.int32).view(tiles, groups, 2, 8, 4, 4, 1)
    shifts = 4 * torch.arange(8, dtype=torch.int32, device=words.device)
    nibbles = ((words >> shifts) & 15).view(tiles, groups, 2, 8, 4, 4, 2, 2, 2)
    codes = (nibbles - 8).to(torch.int8).permute(0, 8, 3, 1, 2, 5, 7, 4, 6).reshape(tiles * TILE, packed.k)

    def vector(start: int) -> Tensor:
        pairs = (
            packed.blocks[..., start : start + size]
            .contiguous()
            .view(packed.dtype)
            .view(tiles, groups, 8, packed.subgroups, 2)
        )
        return pairs.permute(0, 4, 2, 1, 3).reshape(tiles * TILE, groups * packed.subgroups)

    rows = tile_rows(packed.n, gated=packed.gated).flatten().to(codes.device)
    order = torch.argsort(rows, stable=True)[: packed.n]
    zero = None
    if not packed.symmetric:
        offset = vector(CODE_BYTES + size)[order]
        zero = (-offset.to(torch.float32) - OFFSETS[packed.dtype] - 8).to(torch.int8)
    return codes[order], vector(CODE_BYTES)[order], zero


linear = for_packed(stream)
hopper_linear = for_packed(multiply)

STREAMED = ("W4A16_G128", "W4A16_G128_ASYM")
MULTIPLIED = tuple(
    name
    for name, scheme in SCHEMES.items()
    if scheme.activation is None
    and scheme.type == "int"
    and scheme.num_bits <= 4
    and scheme.group_size in (None, *(BLOCK // each for each in SUBGROUPS))
)
"""Schemes that `hopper.cu` multiplies; `stream.cu` has one scale for a block."""
for _kernel in (
    *decode_kernels("stream.w4a16", schemes=STREAMED, fn=linear, repack=repack, refusal=anything),
    *decode_kernels(
        "hopper.w4a16",
        schemes=MULTIPLIED,
        fn=hopper_linear,
        repack=repack,
        refusal=refusal,
        min_sm=90,
        priority=30,
    ),
):
    register(_kernel)
