"""Weights as Triton products read them (`matrix_product.py`): a matrix for each expert, or one alone.

    dense16      numbers [E, O, I] in the model's dtype
    fp8          e4m3 codes [E, O, I], float32 scales [E, O]
    int8         int8 codes [E, O, I], float32 scales [E, O]
    fp8_block    e4m3 codes [E, O, I], float32 scales [E, B, I / 128] of B blocks of output rows, 128 of one
                 matrix (`linear/general.py`: 16 of the stack)
    w4           int16 words [E, O / 16, I / 128, 16, 32], scales [E, O / 16, N, 16] in the model's dtype for
                 N scale groups along I, and for an asymmetric scheme offsets likewise; I is rounded up to
                 whole blocks of 128 columns, with codes and scales of zero

Matrices that share their input are stacked along O, and blocks of fp8_block begin with the first row of each.
Codes of two and three bits are stored as nibbles, too: they are read as fast as four bits, not faster.
Nibble i of word j of w4 holds column 32 i + j of its 128, stored + 8: a product of 128 columns is four of 32,
each of whose factors is a nibble of the same words, so nothing is shuffled. The bits 0x4300 | code are the
bfloat16 128 + code, from which the kernel subtracts 136 + zero point exactly (in float16 0x6400 and 1032): an
offset is - 136 - zero point.

Shapes: E matrices, O out, I in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.quant.scheme import QuantizedWeight, Scheme

MatrixFormat = Literal["dense16", "w4", "fp8", "fp8_block", "int8"]
FORMATS: tuple[MatrixFormat, ...] = ("dense16", "w4", "fp8", "fp8_block", "int8")
BLOCK = 128
"""Columns of words of w4, and columns and rows of a block of fp8_block."""
TILE = 16
OFFSETS = {torch.bfloat16: 136, torch.float16: 1032}
"""The number that the bit trick adds to a code - 8, by dtype."""


@dataclass(frozen=True)
class Matrices:
    """E matrices [O, I]; `group_size` is that of w4, and at least I where a channel has one scale."""

    format: MatrixFormat
    data: Tensor
    scale: Tensor | None
    offset: Tensor | None
    bias_EO: Tensor | None
    out_features: int
    in_features: int
    group_size: int

    def step_columns(self, most: int) -> int:
        """Return the columns of one step of a product: at most `most`, and a divisor of I as it is stored."""
        if self.format == "w4":
            return 2 * BLOCK if most > BLOCK and whole_blocks(self.in_features) % (2 * BLOCK) == 0 else BLOCK
        if self.format in ("fp8_block", "int8"):  # what int8 lacks of a step is not read
            return BLOCK
        return next(step for step in (128, 64, 32, 16) if step <= most and self.in_features % step == 0)


def format_of(scheme: Scheme | None) -> MatrixFormat | None:
    """Return the format of a scheme, None where there is none."""
    if scheme is None:
        return "dense16"
    if scheme.type == "int" and scheme.num_bits <= 4 and scheme.activation is None:
        return "w4"
    if scheme.type == "float" and scheme.scale_type is None and scheme.activation in ("token", "group"):
        return "fp8" if scheme.activation == "token" else "fp8_block"
    rounds_to_int8 = scheme.type == "int" and scheme.num_bits == 8 and scheme.activation == "token"
    return "int8" if rounds_to_int8 and scheme.input_symmetric else None


Weight = Tensor | QuantizedWeight
Parts = tuple[Tensor, Tensor | None, Tensor | None]
"""Data, scales and offsets of one matrix."""
Pack = Callable[[Sequence[Weight], torch.dtype, torch.device], Parts]


def pack_matrices(
    weights: Sequence[Sequence[Weight]],
    biases: Sequence[Sequence[Tensor | None]],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Matrices:
    """Stack the weights of each matrix along O and pack them, one matrix at a time into the memory of all: no
    second copy is made. All have one scheme, but they need not be quantized by one."""
    one = weights[0][0]
    given = format_of(one.scheme if isinstance(one, QuantizedWeight) else None)
    assert given is not None, "no kernel reads this scheme"
    pack = {"dense16": _dense, "w4": _w4, "fp8": _fp8, "fp8_block": _fp8_block, "int8": _int8}[given]
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
    data, scale, offset = whole
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
    return torch.cat([weight.to(device=device, dtype=dtype) for weight in dense]), None, None


def _byte_codes(weights: Sequence[QuantizedWeight], device: torch.device) -> Tensor:
    return torch.cat([weight.codes_OI.to(device).view(torch.uint8) for weight in weights])


def _fp8(weights: Sequence[Weight], dtype: torch.dtype, device: torch.device) -> Parts:
    del dtype
    quantized = _quantized(weights)
    scale = torch.cat([each.scale_OG.to(device=device, dtype=torch.float32) for each in quantized])
    return _byte_codes(quantized, device), scale.flatten(), None


def _int8(weights: Sequence[Weight], dtype: torch.dtype, device: torch.device) -> Parts:
    codes, scale, _ = _fp8(weights, dtype, device)
    return codes.view(torch.int8), scale, None


def _fp8_block(weights: Sequence[Weight], dtype: torch.dtype, device: torch.device) -> Parts:
    del dtype
    quantized = _quantized(weights)
    assert all(each.scheme.block_rows == BLOCK and each.scheme.group_size == BLOCK for each in quantized)
    scale = torch.cat([each.scale_OG.to(device=device, dtype=torch.float32) for each in quantized])
    return _byte_codes(quantized, device), scale, None


def _w4(weights: Sequence[Weight], dtype: torch.dtype, device: torch.device) -> Parts:
    quantized = _quantized(weights)
    in_features = quantized[0].shape[1]
    columns = whole_blocks(in_features)
    groups = columns // (quantized[0].scheme.group_size or columns)

    def stacked(parts: Sequence[Tensor], size: int) -> Tensor:
        stack = torch.cat([part.to(device) for part in parts])
        return F.pad(stack, (0, size - stack.shape[1]))

    codes_OI = stacked([each.codes_OI for each in quantized], columns)
    scale_OG = stacked([each.scale_OG for each in quantized], groups).to(dtype)
    zeros = [each.zero_point_OG for each in quantized if each.zero_point_OG is not None]
    offset = None
    if zeros:
        offset = _tiled((-OFFSETS[dtype] - stacked(zeros, groups).to(torch.float32)).to(dtype))
    return w4_words(codes_OI), _tiled(scale_OG), offset


def whole_blocks(in_features: int) -> int:
    """Return the columns of w4 with which I is stored."""
    return -(-in_features // BLOCK) * BLOCK


def _tiled(values_OG: Tensor) -> Tensor:
    """Return [O / 16, G, 16]."""
    return values_OG.unflatten(0, (-1, TILE)).transpose(1, 2).contiguous()


def w4_words(codes_OI: Tensor) -> Tensor:
    """Return int16 words [O / 16, I / 128, 16, 32] of int8 codes."""
    nibbles = (codes_OI.to(torch.int32) + 8).view(codes_OI.shape[0] // TILE, TILE, -1, 4, 32)
    words = nibbles[..., 0, :]
    for i in range(1, 4):
        words = words | (nibbles[..., i, :] << (4 * i))
    words = torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16)
    return words.transpose(1, 2).contiguous()
