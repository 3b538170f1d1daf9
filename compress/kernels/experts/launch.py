"""The launches of experts, by a plan: pairs sorted by expert, rows rounded, gate and up, down, sum."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.compilers.triton import interpreted, pdl_options
from compress.kernels.experts.grouped import combine, down, gate_up
from compress.kernels.experts.packed import PackedExperts
from compress.kernels.experts.units import Units, sort_pairs
from compress.kernels.operands.matrices import FORMATS, Matrices
from compress.kernels.operands.matrix_product import Tile, e4m3_factors
from compress.kernels.operands.rows import FP8, INT8, ActivationQuant, QuantizedRows
from compress.kernels.quantize_rows.blocks import quantize_blocks
from compress.kernels.quantize_rows.fused import dequantize_rows, quantize_rows

MAX_PAIRED_ROWS = 4
"""Decode rows up to which every pair is a unit (few experts are hit twice, and L2 serves the second), and the
last program of some outputs combines (one program reads K numbers of every row)."""
MAX_DECODE_ROWS = 512
FEW_ROWS = 128
SPANS = (256, 1024)
"""Outputs of a program that adds the choices of a row: of few rows, and of more."""


@dataclass(frozen=True)
class Plan:
    """How experts run: the tiles of both products, whether pairs are sorted (else each is a unit), whether
    the last program of an output tile combines, and the dtype of y.

    `native_fp8` allows that e4m3 codes are multiplied as they are. `prefetch` fetches weights of down while
    gate_up runs, where units are pairs.
    """

    gate_up: Tile
    down: Tile
    sort: bool
    combine: bool
    y_dtype: torch.dtype
    native_fp8: bool = False
    prefetch: bool = False


def run(
    x: Tensor | QuantizedRows,
    packed: PackedExperts,
    ids_TK: Tensor,
    weights_TK: Tensor,
    plan: Plan,
    *,
    activation: str,
    cap: float | None = None,
    residual_TD: Tensor | None = None,
) -> Tensor:
    """Return out [T, D]."""
    num_rows, top_k = ids_TK.shape
    device = ids_TK.device
    hidden = packed.down.out_features
    ffn = packed.down.in_features
    num_pairs = num_rows * top_k
    out_TD = torch.empty(num_rows, hidden, dtype=packed.dtype, device=device)
    if num_rows == 0:
        return out_TD
    assert ids_TK.is_contiguous()
    assert weights_TK.is_contiguous()
    assert plan.gate_up.bn == plan.down.bn, "both products have the same units"
    h_PF = torch.empty(num_pairs, ffn, dtype=packed.dtype, device=device)
    y_PD = torch.empty(num_pairs, hidden, dtype=plan.y_dtype, device=device)
    residual_TD = None if residual_TD is None else residual_TD.contiguous()
    paired = not plan.sort
    x_values, x_scale = operand_of(x, packed.gate_up_input, packed)
    if paired:
        units = Units(ids_TK, ids_TK)
    else:
        units = sort_pairs(ids_TK, packed.num_experts, plan.gate_up.bn)
    common = {
        "K": top_k,
        "D": hidden,
        "F": ffn,
        "FORMAT": FORMATS.index(packed.format),
        "PAIRED": paired,
        "E4M3": e4m3_factors(device, native=plan.native_fp8),
        "PREFETCH": plan.prefetch and paired,
        "INTERPRETED": interpreted(),
        **pdl_options(device),
    }

    def grid(size: int, tile: Tile) -> tuple[int, int]:
        return -(-size // tile.bm), units.experts.numel()

    gate_up[grid(ffn, plan.gate_up)](
        x_values,
        x_scale,
        units.experts,
        units.pairs,
        *_operands(packed.gate_up),
        h_PF,
        **_constants(packed.gate_up, plan.gate_up),
        ACTIVATION=activation,
        CAP=cap or 0.0,
        **common,
    )
    h_values, h_scale = operand_of(h_PF, packed.down_input, packed)
    down[grid(hidden, plan.down)](
        h_values,
        h_scale,
        units.experts,
        units.pairs,
        *_operands(packed.down),
        y_PD,
        weights_TK,
        residual_TD,
        out_TD,
        packed.arrivals,
        num_pairs,
        **_constants(packed.down, plan.down),
        E=packed.num_experts,
        RESIDUAL=residual_TD is not None,
        COMBINE=plan.combine,
        **common,
    )
    if not plan.combine:
        add_choices(y_PD, weights_TK, residual_TD, out_TD)
    return out_TD


def operand_of(
    x: Tensor | QuantizedRows, quant: ActivationQuant | None, packed: PackedExperts
) -> tuple[Tensor, Tensor | None]:
    """Return the rows as a product reads them, and their scales where they are codes of eight bits."""
    if isinstance(x, Tensor) and quant is not None:
        x = (quantize_rows if quant.scale_type is None else quantize_blocks)(x, quant)
    if isinstance(x, QuantizedRows) and packed.format not in ("fp8", "fp8_block", "int8"):
        x = dequantize_rows(x, packed.dtype)
    if isinstance(x, Tensor):
        return x.contiguous(), None
    assert x.values_TK.dtype == (INT8 if packed.format == "int8" else FP8), "rows of another type"
    return x.values_TK if packed.format == "int8" else x.values_TK.view(torch.uint8), x.scale_T


def add_choices(y_PD: Tensor, weights_TK: Tensor, residual_TD: Tensor | None, out_TD: Tensor) -> None:
    """Write out = residual + round(sum over K of weights y), y of pairs t K + k."""
    num_rows, top_k = weights_TK.shape
    hidden = out_TD.shape[1]
    span = SPANS[num_rows > FEW_ROWS]
    combine[num_rows, -(-hidden // span)](
        y_PD,
        weights_TK,
        residual_TD,
        out_TD,
        D=hidden,
        K=top_k,
        SPAN=span,
        RESIDUAL=residual_TD is not None,
        num_warps=4,
        **pdl_options(out_TD.device),
    )


def _operands(matrices: Matrices) -> tuple[Tensor | None, ...]:
    return matrices.data, matrices.scale, matrices.offset, matrices.outer, matrices.bias_EO


def _constants(matrices: Matrices, tile: Tile) -> dict[str, int | bool]:
    scale = matrices.scale
    return {
        "BLOCKS": scale.shape[1] if scale is not None else 0,
        "BM": tile.bm,
        "BN": tile.bn,
        "BK": tile.bk,
        "GROUP": matrices.group_size,
        "ASYMMETRIC": matrices.offset is not None,
        "BIAS": matrices.bias_EO is not None,
        "STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
    }
