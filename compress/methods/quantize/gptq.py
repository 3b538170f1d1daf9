"""GPTQ (arXiv 2210.17323): round column by column and let the columns still to come absorb the error, as the inverse Hessian says.

For one row w with H = E[x x^T] (damped), U the upper Cholesky factor of H^-1 and columns in order i = 0 .. I-1:

    q_i = round(w_i),   e = (w_i - q_i) / U_ii,   w_j -= e * U_ij  for j > i

which minimises (w - q) H (w - q)^T greedily. Columns go in blocks: inside a block the update runs column by column, the rest of the
matrix gets one product per block. Static act-order: columns are processed by falling diag H, while scales belong to the groups of the
original order and are fixed before the first column is rounded, so no g_idx exists at run time.

Damping adds a share of mean(diag H) to the diagonal; if a factorisation fails the share is raised by the ladder and reported. H is never
replaced. A feature that never fires (diag 0) carries no output: its weights become zero.

Shapes: O out, I in, G groups, B columns of a block. All arithmetic in float32.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from compress.calibrate.stats import InputStats, SecondMoment, Stat
from compress.errors import UsageError
from compress.kernels.columns import round_block
from compress.methods.quantize import ROUNDERS, Rounded, Rounder
from compress.quant.numerics import ScaleChoice, choose_scale
from compress.quant.scheme import QuantizedWeight, Scheme

DAMPING_LADDER = (1.0, 3.0, 10.0, 30.0, 100.0)
"""Multiples of the configured damping that are tried in turn."""


@ROUNDERS.register("gptq")
class Gptq(Rounder):
    kind: Literal["gptq"] = "gptq"
    damping: float = Field(0.01, gt=0, le=1, description="share of mean(diag H) added to the diagonal")
    act_order: bool = Field(
        True, description="process columns by falling diag H; scales stay in place (static order)"
    )
    block_size: int = Field(
        128, ge=1, description="columns between two updates of the whole matrix; changes speed, not codes"
    )
    scale: ScaleChoice = Field(
        "hessian", description="range of a group: all of it, least squared error, or least output error"
    )

    def needs(self) -> tuple[type[Stat], ...]:
        return (SecondMoment,)

    def round(self, w_OI: Tensor, stats: InputStats, scheme: Scheme, *, scale_dtype: torch.dtype) -> Rounded:
        h_II = stats[SecondMoment].mean()
        dead_I = h_II.diagonal() == 0
        w_OI = torch.where(dead_I, torch.zeros_like(w_OI), w_OI)
        scale_OG, zero_point_OG = choose_scale(w_OI, scheme, scale_dtype, choice=self.scale, h_II=h_II)
        order = (
            torch.argsort(h_II.diagonal(), descending=True, stable=True)
            if self.act_order
            else torch.arange(w_OI.shape[1])
        )
        order = order.to(w_OI.device)
        factor_II, damping = inverse_factor(h_II[order][:, order], damping=self.damping)
        by_row_OG = scheme.by_row(scale_OG, len(w_OI))
        codes_OI = round_columns(
            w_OI, order, factor_II, scheme, by_row_OG, zero_point_OG, block_size=self.block_size
        )
        facts = {"damping": damping, "dead_inputs": int(dead_I.sum())}
        return Rounded(QuantizedWeight(scheme, codes_OI, scale_OG, zero_point_OG), facts)


def inverse_factor(h_II: Tensor, *, damping: float) -> tuple[Tensor, float]:
    """Upper triangular U with U^T U = (H + d I)^-1, and the damping share d / mean(diag H) that made it possible.

    Raises:
        UsageError: H is not positive definite even at the top of the ladder (activations hold NaN or infinity).
    """
    h_II = h_II.clone()
    diagonal = h_II.diagonal()
    dead_I = diagonal == 0
    mean = diagonal[~dead_I].mean() if bool((~dead_I).any()) else torch.ones((), device=h_II.device)
    diagonal[dead_I] = mean
    for multiple in DAMPING_LADDER:
        share = min(1.0, damping * multiple)
        damped = h_II + torch.eye(h_II.shape[0], device=h_II.device) * (share * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed == 0:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if failed == 0 and bool(torch.isfinite(upper).all()):
                return upper, share
    raise UsageError(
        "the second moment of a layer's inputs cannot be factorised even with the largest damping: the calibration data drives the model "
        "to NaN or infinity. Check the checkpoint, or compute in float32."
    )


def round_columns(
    w_OI: Tensor,
    order: Tensor,
    factor_II: Tensor,
    scheme: Scheme,
    scale_OG: Tensor,
    zero_point_OG: Tensor | None,
    *,
    block_size: int,
) -> Tensor:
    """Codes [O, I] in the original column order; `factor_II` is in processing order."""
    out_features, in_features = w_OI.shape
    group_of = order // (in_features // scale_OG.shape[1])
    scale_IO = scale_OG.to(torch.float32).t()[group_of].contiguous()
    zero_IO = None if zero_point_OG is None else zero_point_OG.to(torch.float32).t()[group_of].contiguous()
    w_IO = w_OI.t()[order].contiguous()  # columns become rows: one column is contiguous
    codes_IO = torch.empty_like(w_IO)
    for begin in range(0, in_features, block_size):
        end = min(begin + block_size, in_features)
        inside = slice(begin, end)
        zero_BO = None if zero_IO is None else zero_IO[inside]
        codes_IO[inside], errors_BO = round_block(
            w_IO[inside], factor_II[inside, inside], scheme, scale_IO[inside], zero_BO
        )
        if end < in_features:
            w_IO[end:].addmm_(factor_II[inside, end:].t(), errors_BO, alpha=-1)
    codes_OI = torch.empty(out_features, in_features, dtype=scheme.code_dtype, device=w_OI.device)
    codes_OI.view(torch.int8)[:, order] = (
        codes_IO.t().to(scheme.code_dtype).view(torch.int8)
    )  # torch indexes bytes, not e4m3, everywhere
    return codes_OI
