"""Weights as Triton products read them (`matrix_product.py`): a matrix for each expert, or one alone.

    dense16      numbers [E, O, I] in the model's dtype
    fp8          e4m3 codes [E, O, I], float32 scales [E, O]
    int8         int8 codes [E, O, I], float32 scales [E, O]
    fp8_block    e4m3 codes [E, O, I], float32 scales [E, B, I / 128] of B blocks of output rows, 128 of one
                 matrix (`linear/general.py`: 16 of the stack)
    w4           int16 words [E, O / 16, I / 128, 16, 32], scales [E, O / 16, N, 16] in the model's dtype for
                 N scale groups along I, and for an asymmetric scheme offsets likewise; I is rounded up to
                 whole blocks of 128 columns, with codes and scales of zero
    w8           int8 codes [E, O, I], float32 scales [E, O]; rows stay numbers of 16 bits
    fp4          words as of w4 and scales likewise, of which a product with a code is exact; `outer`, float32
                 [E, O], multiplies outputs where the scales are not the whole scale

Matrices that share their input are stacked along O, and blocks of fp8_block begin with the first row of each.
Codes of two and three bits are stored as nibbles, too: they are read as fast as four bits, not faster.
Nibble i of word j of w4 holds column 32 i + j of its 128, stored + 8: a product of 128 columns is four of 32,
each of whose factors is a nibble of the same words, so nothing is shuffled. An offset is -(136 + zero point),
in float16 -(1032 + zero point): what is added to a number whose last bits are a code, as those of 128 + code
are in bfloat16. A nibble of fp4 is a number of e2m1 (`quant/e2m1.py`), zero where I ends. Its scale is a
power of two, or an e4m3 number over a global scale g: then 2^e is stored in place of g, and `outer` has 2^e /
g, between a half and 1.

Shapes: E matrices, O out, I in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.quant import e2m1
from compress.quant.scale_grid import global_scale_of, to_e4m3
from compress.quant.scheme import QuantizedWeight, Scheme

MatrixFormat = Literal["dense16", "w4", "fp8", "fp8_block", "int8", "w8", "fp4"]
FORMATS: tuple[MatrixFormat, ...] = ("dense16", "w4", "fp8", "fp8_block", "int8", "w8", "fp4")
IN_WORDS: tuple[MatrixFormat, ...] = ("w4", "fp4")
"""Formats of four bits, whose outputs lie in tiles of 16 and whose columns in blocks of 128."""
BLOCK = 128
"""Columns of words of w4, and columns and rows of a block of fp8_block."""
TILE = 16
OFFSETS = {torch.bfloat16: 136, torch.float16: 1032}
"""The number that the bit trick adds to a code - 8, by dtype."""


@dataclass(frozen=True)
class Matrices:
    """E matrices [O, I]; `group_size` is that of four bits, and at least I where a channel has one scale."""

    format: MatrixFormat
    data: Tensor
    scale: Tensor | None
    offset: Tensor | None
    bias_EO: Tensor | None
    out_features: int
    in_features: int
    group_size: int
    outer: Tensor | None = None

    def step_columns(self, most: int) -> int:
        """Return the columns of one step of a product: at most `most`, and a divisor of I as it is stored."""
        if self.format == "w4":
            return 2 * BLOCK if most > BLOCK and whole_blocks(self.in_features) % (2 * BLOCK) == 0 else BLOCK
        if self.format in ("fp8_block", "int8", "fp4"):  # what int8 lacks of a step is not read
            return BLOCK
        return next(step for step in (128, 64, 32, 16) if step <= most and self.in_features % step == 0)


def format_of(scheme: Scheme | None) -> MatrixFormat | None:
    """Return the format of a scheme, None where there is none."""
    if scheme is None:
        return "dense16"
    if scheme.activation is None and scheme.num_bits <= 4:
        return "w4" if scheme.type == "int" else "fp4"
    if scheme.activation is None and scheme.type == "int" and scheme.symmetric and scheme.group_size is None:
        return "w8"
    if scheme.type == "float" and scheme.scale_type is None and scheme.activation in ("token", "group"):
        return "fp8" if scheme.activation == "token" else "fp8_block"
    rounds_to_int8 = scheme.type == "int" and scheme.num_bits == 8 and scheme.activation == "token"
    return "int8" if rounds_to_int8 and scheme.input_symmetric else None


def format_of_weights(scheme: Scheme | None) -> MatrixFormat:
    """Return the format in which a product by rows rounded beforehand reads weights of a scheme: that of the
    scheme; else that of eight-bit codes by such codes, where one scale serves all columns of a row; else
    that of the same weights by 16-bit rows, and 16-bit numbers where codes have no such format."""
    if scheme is None:
        return "dense16"
    by_codes = scheme.activation == "tensor" and scheme.input_symmetric
    other = replace(scheme, activation="token" if by_codes else None, activation_type=None)
    return format_of(scheme) or format_of(other) or "dense16"


def refuse_powers(scheme: Scheme, dtype: torch.dtype) -> str | None:
    """Return why a dtype has no numbers for codes times the scales of a scheme; None where it has."""
    if scheme.scale_type == "e8m0" and dtype == torch.float16:
        return "float16 does not hold every power of two that is a scale"
    return None


Weight = Tensor | QuantizedWeight
Parts = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Data, scales, offsets and outer scales of one matrix."""
Pack = Callable[[Sequence[Weight], torch.dtype, torch.device], Parts]


def pack_matrices(
    weights: Sequence[Sequence[Weight]],
    biases: Sequence[Sequence[Tensor | None]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    format: MatrixFormat | None = None,
) -> Matrices:
    """Stack the weights of each matrix along O and pack them, one matrix at a time into the memory of all: no
    second copy is made. All have one scheme, but they need not be quantized by one. `format` is that of
    the scheme, where no other is given that holds its numbers."""
    one = weights[0][0]
    given = format or format_of(one.scheme if isinstance(one, QuantizedWeight) else None)
    assert given is not None, "no kernel reads this scheme"
    packs: dict[MatrixFormat, Pack] = {
        "dense16": _dense,
        "w4": _w4,
        "fp8": _fp8,
        "fp8_block": _fp8_block,
        "int8": _int8,
        "w8": _int8,
        "fp4": _fp4,
    }
    pack = packs[given]
    whole: list[Tensor | None] = []
    for idx, stack in enumerate(weights):
        parts = pack(stack, dtype, device)
        if not whole:
            whole = [
                None
                if part is None
                else torch.empty(len(weights), *part.shape, dtype=part.dtype, device=device)
                for part in parts
            ]
        for all_of_them, part in zip(whole, parts, strict=True):
            if all_of_them is not None and part is not None:
                all_of_them[idx].copy_(part)
    in_features = one.shape[1]
    group_size = one.scheme.group_size if isinstance(one, QuantizedWeight) else None
    data, scale, offset, outer = whole
    assert data is not None
    return Matrices(
        given,
        data,
        scale,
        offset,
        _bias(biases, dtype, device),
        sum(weight.shape[0] for weight in weights[0]),
        in_features,
        group_size or whole_blocks(in_features),
        outer,
    )


def _bias(
    biases: Sequence[Sequence[Tensor | None]], dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    stacked = [torch.cat([each for each in row if each is not None]) for row in biases if row[0] is not None]
    assert len(stacked) in (0, len(biases)), "all matrices have a bias, or none has"
    return torch.stack(stacked).to(device=device, dtype=dtype) if stacked else None


def _quantized(weights: Sequence[Weight]) -> list[QuantizedWeight]:
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    assert len(quantized) == len(weights), "a dense weight among codes"
    return quantized


def _dense(weights: Sequence[Weight], dtype: torch.dtype, device: torch.device) -> Parts:
    dense = [weight.dequantize() if isinstance(weight, QuantizedWeight) else weight for weight in weights]
    return torch.cat([weight.to(device=device, dtype=dtype) for weight in dense]), None, None, None


def _byte_codes(weights: Sequence[QuantizedWeight], device: torch.device) -> Tensor:
    return torch.cat([weight.codes_OI.to(device).view(torch.uint8) for weight in weights])


def _fp8(weights: Sequence[Weight], dtype: torch.dtype, device: torch.device) -> Parts:
    del dtype
    quantized = _quantized(weights)
    scale = torch.cat([each.scale_OG.to(device=device, dtype=torch.float32) for each in quantized])
    return _byte_codes(quantized, device), scale.flatten(), None, None


def _int8(weights: Sequence[Weight], dtype: torch.dtype, device: torch.device) -> Parts:
    codes, scale, _, _ = _fp8(weights, dtype, device)
    return codes.view(torch.int8), scale, None, None


def _fp8_block(weights: Sequence[Weight], dtype: torch.dtype, device: torch.device) -> Parts:
    del dtype
    quantized = _quantized(weights)
    assert all(each.scheme.block_rows == BLOCK and each.scheme.group_size == BLOCK for each in quantized)
    scale = torch.cat([each.scale_OG.to(device=device, dtype=torch.float32) for each in quantized])
    return _byte_codes(quantized, device), scale, None, None


def _w4(weights: Sequence[Weight], dtype: torch.dtype, device: torch.device) -> Parts:
    quantized = _quantized(weights)
    columns = whole_blocks(quantized[0].shape[1])
    groups = columns // (quantized[0].scheme.group_size or columns)
    codes_OI = _stacked([each.codes_OI for each in quantized], columns, device)
    scale_OG = _stacked([each.scale_OG for each in quantized], groups, device).to(dtype)
    zeros = [each.zero_point_OG for each in quantized if each.zero_point_OG is not None]
    offset = None
    if zeros:
        offset = _tiled((-OFFSETS[dtype] - _stacked(zeros, groups, device).to(torch.float32)).to(dtype))
    return w4_words(codes_OI), _tiled(scale_OG), offset, None


def _fp4(weights: Sequence[Weight], dtype: torch.dtype, device: torch.device) -> Parts:
    quantized = _quantized(weights)
    scheme = quantized[0].scheme
    assert scheme.group_size is not None, "codes of e2m1 have scale groups"
    columns = whole_blocks(quantized[0].shape[1])
    halves_OI = _stacked([e2m1.halves(each.codes_OI.to(device)) for each in quantized], columns, device)
    scales, outer = zip(*(e2m1_scales(each, device) for each in quantized), strict=True)
    scale_OG = _stacked([each.to(dtype) for each in scales], columns // scheme.group_size, device)
    return (
        _words(halves_OI),
        _tiled(scale_OG),
        None,
        torch.cat(outer) if scheme.scale_type == "e4m3" else None,
    )


def e2m1_scales(weight: QuantizedWeight, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return scales, float32 [O, G], of which a product with a code is exact in 16 bits, and what outputs are
    multiplied by, float32 [O]."""
    scale_OG = weight.scale_OG.to(device=device, dtype=torch.float32)
    if weight.scheme.scale_type != "e4m3":
        return scale_OG, torch.ones(len(scale_OG), device=device)
    g = global_scale_of(scale_OG) if weight.global_scale is None else weight.global_scale.to(device)
    mantissa, exponent = torch.frexp(g.to(torch.float32))
    exact_OG = torch.ldexp(to_e4m3(scale_OG, g).to(torch.float32), 1 - exponent)
    return exact_OG, (0.5 / mantissa).expand(len(scale_OG))


def _stacked(parts: Sequence[Tensor], size: int, device: torch.device) -> Tensor:
    """Stack along O, and fill up with zeros to `size` columns."""
    stack = torch.cat([part.to(device) for part in parts])
    return F.pad(stack, (0, size - stack.shape[1]))


def whole_blocks(in_features: int) -> int:
    """Return the columns of w4 with which I is stored."""
    return -(-in_features // BLOCK) * BLOCK


def _tiled(values_OG: Tensor) -> Tensor:
    """Return [O / 16, G, 16]."""
    return values_OG.unflatten(0, (-1, TILE)).transpose(1, 2).contiguous()


def w4_words(codes_OI: Tensor) -> Tensor:
    """Return int16 words [O / 16, I / 128, 16, 32] of int8 codes."""
    return _words(codes_OI.to(torch.int32) + 8)


def _words(nibbles_OI: Tensor) -> Tensor:
    nibbles = nibbles_OI.to(torch.int32).view(nibbles_OI.shape[0] // TILE, TILE, -1, 4, 32)
    words = nibbles[..., 0, :]
    for i in range(1, 4):
        words = words | (nibbles[..., i, :] << (4 * i))
    words = torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16)
    return words.transpose(1, 2).contiguous()
