"""Weights of every format of `operands/matrices.py` as a linear of every size reads them, in decode
(`slices.py`) and for prompts (`general.py`).

Formats that tuned kernels read, too, are packed as these pack them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compress.kernels.linear import dense16, fp8, int8
from compress.kernels.linear.fp8 import PackedFp8
from compress.kernels.linear.int8 import PackedInt8
from compress.kernels.linear.launch import KernelWeight
from compress.kernels.operands.matrices import (
    IN_WORDS,
    TILE,
    Matrices,
    MatrixFormat,
    format_of,
    pack_matrices,
    refuse_powers,
)
from compress.kernels.problem import DENSE_SCHEMES, Problem
from compress.kernels.select import Repack
from compress.quant.scheme import SCHEMES, QuantizedWeight

MIN_COLUMNS = 16
BLOCK_ROWS = 128
"""Output rows of a block of fp8_block."""


@dataclass(frozen=True)
class Blocks:
    """One matrix, and the output rows that share a scale of fp8_block; `scale_KO` [I / 128, O] has these
    scales for each output, `scale_blocks` [O / 128, I / 128] each once, None where a block has rows of two
    weights. `sum_O` are the sums of the codes of int8, for asymmetric rows. Codes of w8 may be `interleaved`
    (`w8a16.py`)."""

    matrices: Matrices
    scale_rows: int
    dtype: torch.dtype
    scale_KO: Tensor | None = None
    scale_blocks: Tensor | None = None
    sum_O: Tensor | None = None
    interleaved: bool = False

    @property
    def kernel_weight(self) -> KernelWeight:
        """The weight as `hopper.cu` reads it."""
        codes_OI = self.matrices.data[0]
        if self.interleaved:
            return KernelWeight("w8", codes_OI, *codes_OI.shape, scale_O=self.matrices.scale)
        assert self.matrices.format == "fp8_block"
        return KernelWeight("fp8_block", codes_OI, *codes_OI.shape, scale_KO=self.scale_KO)


def repack(
    weights: Sequence[Tensor | QuantizedWeight], *, dtype: torch.dtype, device: torch.device, gated: bool
) -> Blocks:
    """Stack weights along O. A scale of fp8_block serves as many rows as lie in one block of every weight."""
    del gated  # gate and up are found by their rows
    matrices = pack_matrices([weights], [[None]], dtype=dtype, device=device)
    if matrices.format != "fp8_block":
        return Blocks(matrices, 1, dtype)
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    scale_rows = TILE if all(weight.shape[0] % TILE == 0 for weight in quantized) else 1
    whole = all(weight.shape[0] % BLOCK_ROWS == 0 for weight in quantized)
    by_row = torch.cat([each.scheme.by_row(each.scale_OG, each.shape[0]) for each in quantized])
    scale_OG = by_row.to(device=device, dtype=torch.float32)
    scale = scale_OG[::scale_rows].contiguous().unsqueeze(0)
    blocks = scale_OG[::BLOCK_ROWS].contiguous() if whole else None
    return Blocks(replace(matrices, scale=scale), scale_rows, dtype, scale_OG.t().contiguous(), blocks)


def as_blocks(packed: Any) -> Blocks:
    """Return a weight in the layout of a tuned kernel, or of `repack`, as the product reads it."""
    if isinstance(packed, Blocks):
        return packed
    if isinstance(packed, PackedFp8):
        codes = packed.values.view(torch.uint8)
        return Blocks(
            Matrices("fp8", codes, packed.scale_O, None, None, codes.shape[0], codes.shape[1], 0),
            1,
            packed.dtype,
        )
    if isinstance(packed, PackedInt8):
        return Blocks(
            Matrices("int8", packed.codes_OI, packed.scale_O, None, None, packed.n, packed.k, 0),
            1,
            packed.dtype,
            sum_O=packed.sum_O,
        )
    return Blocks(
        Matrices("dense16", packed, None, None, None, packed.shape[0], packed.shape[1], 0), 1, packed.dtype
    )


REPACKS: dict[MatrixFormat, Repack] = {
    "dense16": dense16.repack,
    "fp8": fp8.repack,
    "fp8_block": repack,
    "w4": repack,
    "int8": int8.repack,
    "w8": repack,
    "fp4": repack,
}


def _format(problem: Problem) -> MatrixFormat | None:
    if problem.scheme == DENSE_SCHEMES[problem.dtype]:
        return "dense16"
    scheme = SCHEMES.get(problem.scheme)
    if scheme is not None and scheme.type == "float" and scheme.activation == "tensor":
        return "fp8"
    if problem.scheme in int8.SCHEMES:  # the rows bring what differs between them
        return "int8"
    return None if scheme is None else format_of(scheme)


def refusal(problem: Problem, *, given: MatrixFormat, activation: str | None, decode: bool) -> str | None:
    """Return why no linear of every size serves a problem with weights of a format; None where one does."""
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in 16 bits, not in {problem.dtype}"
    if _format(problem) != given:
        return f"for weights in the format {given}"
    if problem.activation != activation:
        return f"its outputs are gated by {activation}" if activation else "its outputs are not gated"
    if decode != problem.row_invariant:
        return "for decode rows" if decode else "a row's bits depend on the number of rows"
    if problem.k % MIN_COLUMNS:
        return f"K = {problem.k} is no multiple of {MIN_COLUMNS}"
    scheme = SCHEMES.get(problem.scheme)
    if scheme is not None and scheme.group_size is not None and problem.k % scheme.group_size:
        return f"K = {problem.k} is no multiple of the group size {scheme.group_size}"
    if scheme is not None and (reason := refuse_powers(scheme, problem.dtype)):
        return reason
    if given == "int8" and (reason := int8.refuse_long_sums(problem)):
        return reason
    tile = 2 * TILE if activation and decode else TILE  # a tile of gates, and one of ups
    if given in IN_WORDS and problem.n % tile:
        return f"N = {problem.n} is no multiple of {tile}"
    return None
