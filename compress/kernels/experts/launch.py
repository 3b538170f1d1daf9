"""The parts that the experts of decode rows and those of prompts share: rows as products read them, and the
sum over the choices of a token."""

import torch
from torch import Tensor

from compress.kernels.compilers.triton import pdl_options
from compress.kernels.experts.grouped import combine
from compress.kernels.experts.packed import PackedExperts
from compress.kernels.operands.rows import FP8, ActivationQuant, QuantizedRows
from compress.kernels.quantize_rows.fused import quantize_rows

SPAN = 1024
"""Outputs of a program that adds the choices of a row."""


def operand(x: Tensor | QuantizedRows, packed: PackedExperts) -> tuple[Tensor, Tensor | None]:
    """Return the rows as a product reads them, and their scales where they are e4m3 codes."""
    if isinstance(x, Tensor):
        if packed.format not in ("fp8", "fp8_block"):
            return x.contiguous(), None
        group_size = 128 if packed.format == "fp8_block" else None
        quantized = quantize_rows(x, ActivationQuant(group_size=group_size))
        assert isinstance(quantized, QuantizedRows)
        x = quantized
    assert x.values_TK.dtype == FP8, "experts read e4m3 rows"
    return x.values_TK.view(torch.uint8), x.scale_T


def add_choices(y_PD: Tensor, weights_TK: Tensor, residual_TD: Tensor | None, out_TD: Tensor) -> None:
    """Write out = residual + round(sum over K of weights y), y of pairs t K + k."""
    num_rows, top_k = weights_TK.shape
    hidden = out_TD.shape[1]
    combine[num_rows, -(-hidden // SPAN)](
        y_PD,
        weights_TK,
        residual_TD,
        out_TD,
        D=hidden,
        K=top_k,
        SPAN=SPAN,
        RESIDUAL=residual_TD is not None,
        num_warps=4,
        **pdl_options(out_TD.device),
    )
