"""The experts of a layer as the grouped kernels read them: one tensor for all gates and ups, one for all
downs.

    dense16      numbers [E, O, I] in the model's dtype
    fp8          e4m3 codes [E, O, I], float32 scales [E, O]
    fp8_block    e4m3 codes [E, O, I], float32 scales [E, B, I / 128], B blocks of 128 output rows; those of
                 gate and of up are counted apart
    w4           int16 words [E, O / 16, I / 128, 16, 32], scales [E, O / 16, N, 16] in the model's dtype for
                 N scale groups along I, and for an asymmetric scheme offsets likewise; I is rounded up to
                 whole blocks of 128 columns, with codes and scales of zero

O is F of gate, then F of up, or D of down. Nibble i of word j holds column 32 i + j of its 128, stored + 8: a
product of 128 columns is four of 32, each of whose factors is a nibble of the same words, so nothing is
shuffled. The bits 0x4300 | code are the bfloat16 128 + code, from which the kernel subtracts 136 + zero point
exactly (in float16 0x6400 and 1032): an offset is - 136 - zero point.

Shapes: E experts, D hidden, F ffn, O out, I in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.routing import ExpertWeights
from compress.quant.scheme import QuantizedWeight, Scheme

ExpertFormat = Literal["dense16", "w4", "fp8", "fp8_block"]
FORMATS: tuple[ExpertFormat, ...] = ("dense16", "w4", "fp8", "fp8_block")
BLOCK = 128
"""Columns of words of w4, and columns and rows of a block of fp8_block."""
TILE = 16
OFFSETS = {torch.bfloat16: 136, torch.float16: 1032}
"""The number that the bit trick adds to a code - 8, by dtype."""


@dataclass(frozen=True)
class ExpertMatrices:
    """One matrix [O, I] for each of E experts; `group_size` is that of w4, and at least I where a channel has
    one scale."""

    data: Tensor
    scale: Tensor | None
    offset: Tensor | None
    bias_EO: Tensor | None
    out_features: int
    in_features: int
    group_size: int


@dataclass(frozen=True)
class PackedExperts:
    """All experts of a layer. `arrivals` are zeroed counters [D / 16] that a kernel leaves zeroed; `dtype` is
    the model's."""

    format: ExpertFormat
    gate_up: ExpertMatrices
    down: ExpertMatrices
    num_experts: int
    dtype: torch.dtype
    arrivals: Tensor

    @property
    def bytes_per_expert(self) -> int:
        """Bytes of weights and scales that one expert reads."""
        tensors = [
            each
            for matrices in (self.gate_up, self.down)
            for each in (matrices.data, matrices.scale, matrices.offset, matrices.bias_EO)
        ]
        total = sum(each.numel() * each.element_size() for each in tensors if each is not None)
        return total // self.num_experts


def format_of(scheme: Scheme | None) -> ExpertFormat | None:
    """Return the format of a scheme, None where there is none."""
    if scheme is None:
        return "dense16"
    if scheme.type == "int" and scheme.num_bits == 4 and scheme.activation is None:
        return "w4"
    if scheme.type == "float" and scheme.activation in ("token", "group"):
        return "fp8" if scheme.activation == "token" else "fp8_block"
    return None


def repack(experts: Sequence[ExpertWeights], *, dtype: torch.dtype, device: torch.device) -> PackedExperts:
    """Repack the experts of a layer; all have one scheme, but they need not be quantized by one."""
    first = experts[0].gate
    given = format_of(first.scheme if isinstance(first, QuantizedWeight) else None)
    assert given is not None, "no kernel reads this scheme"
    pack = {"dense16": _dense, "w4": _w4, "fp8": _fp8, "fp8_block": _fp8_block}[given]
    gate_ups = [(each.gate, each.up) for each in experts]
    downs = [(each.down,) for each in experts]
    down_bias = [(each.down_bias,) for each in experts]
    gate_up_bias = [(each.gate_bias, each.up_bias) for each in experts]
    hidden_size = experts[0].down.shape[0]
    return PackedExperts(
        given,
        _matrices(gate_ups, gate_up_bias, pack, dtype=dtype, device=device),
        _matrices(downs, down_bias, pack, dtype=dtype, device=device),
        len(experts),
        dtype,
        torch.zeros(-(-hidden_size // TILE), dtype=torch.int32, device=device),
    )


Weight = Tensor | QuantizedWeight
Parts = tuple[Tensor, Tensor | None, Tensor | None]
"""Data, scales and offsets of one expert."""
Pack = Callable[[Sequence[Weight], torch.dtype, torch.device], Parts]


def _matrices(
    weights: Sequence[Sequence[Weight]],
    biases: Sequence[Sequence[Tensor | None]],
    pack: Pack,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> ExpertMatrices:
    """Pack one expert at a time into the memory of all: no second copy of the experts is made."""
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
    first = weights[0][0]
    in_features = first.shape[1]
    group_size = first.scheme.group_size if isinstance(first, QuantizedWeight) else None
    data, scale, offset = whole
    assert data is not None
    return ExpertMatrices(
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
    assert len(stacked) in (0, len(biases)), "all experts have a bias, or none has"
    return torch.stack(stacked).to(device=device, dtype=dtype) if stacked else None


def _quantized(weights: Sequence[Weight]) -> list[QuantizedWeight]:
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    assert len(quantized) == len(weights), "a dense weight among codes"
    return quantized


def _dense(weights: Sequence[Weight], dtype: torch.dtype, device: torch.device) -> Parts:
    dense = [weight.dequantize() if isinstance(weight, QuantizedWeight) else weight for weight in weights]
    return torch.cat([weight.to(device=device, dtype=dtype) for weight in dense]), None, None


def _fp8_codes(weights: Sequence[QuantizedWeight], device: torch.device) -> Tensor:
    return torch.cat([weight.codes_OI.to(device).view(torch.uint8) for weight in weights])


def _fp8(weights: Sequence[Weight], dtype: torch.dtype, device: torch.device) -> Parts:
    del dtype
    quantized = _quantized(weights)
    scale = torch.cat([each.scale_OG.to(device=device, dtype=torch.float32) for each in quantized])
    return _fp8_codes(quantized, device), scale.flatten(), None


def _fp8_block(weights: Sequence[Weight], dtype: torch.dtype, device: torch.device) -> Parts:
    del dtype
    quantized = _quantized(weights)
    assert all(each.scheme.block_rows == BLOCK and each.scheme.group_size == BLOCK for each in quantized)
    scale = torch.cat([each.scale_OG.to(device=device, dtype=torch.float32) for each in quantized])
    return _fp8_codes(quantized, device), scale, None


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
