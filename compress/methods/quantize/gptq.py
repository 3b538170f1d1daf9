"""GPTQ (arXiv 2210.17323): round column by column, and let the columns that are still to come absorb the
error.

It minimises the output error (w - q) H (w - q)^T of each row w, with H = E[x x^T] (damped), greedily. With U
the upper triangular factor of the inverse, U^T U = H^-1, the whole inner loop is

    for i in 0 .. I-1:                                    # columns, most active inputs first
        c_i = clamp(round(w_i / s_i) + z_i)               # codes of column i, every row at once
        q_i = (c_i - z_i) s_i                             # their values
        e_i = (w_i - q_i) / U_ii                          # the error that the later columns absorb
        for j in i+1 .. I-1:
            w_j = w_j - e_i U_ij

Columns go in blocks of `block_size`: inside a block the loop above runs (`kernels/columns`), and the columns
after the block are updated by one matrix product, W[:, after] -= E U[block, after].

Static act-order: columns are processed by falling diag H, while scales belong to the scale groups of the
original order and are fixed before the first column is rounded, so inference needs no index of groups
(g_idx).

Damping adds a share of mean(diag H) to the diagonal. If a factorisation fails, larger shares are tried in
turn (`DAMPING_LADDER`) and the one that worked is reported; H itself is never replaced. An input that is
always zero (diagonal 0) contributes nothing: its weights become zero.

Not done: scales are not recomputed while columns are rounded, as the paper's code does without act-order.

Memory layout: columns as rows ([I, O]), so that a column is contiguous; all arithmetic in float32. Shapes: O
out, I in, G scale groups, B columns of a block.
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
from compress.recipe import MAX_SIZE

DAMPING_LADDER = (1.0, 3.0, 10.0, 30.0, 100.0)
"""Multiples of the configured damping that are tried in turn."""


@ROUNDERS.register("gptq")
class Gptq(Rounder):
    """GPTQ with static act-order."""

    kind: Literal["gptq"] = "gptq"
    damping: float = Field(0.01, gt=0, le=1, description="share of mean(diag H) added to the diagonal")
    act_order: bool = Field(
        True, description="process columns by falling diag H; scales stay in place (static order)"
    )
    block_size: int = Field(
        128,
        ge=1,
        le=MAX_SIZE,
        description="columns between two updates of the whole matrix; changes speed, not codes",
    )
    scale: ScaleChoice = Field(
        "hessian", description="range of a group: all of it, least squared error, or least output error"
    )

    def needs(self) -> tuple[type[Stat], ...]:
        return (SecondMoment,)

    def round(self, w_OI: Tensor, stats: InputStats, scheme: Scheme, *, scale_dtype: torch.dtype) -> Rounded:
        """Return the codes of GPTQ; facts are the `damping` that worked and the number of `dead_inputs`.

        Raises:
            UsageError: H cannot be factorised.
        """
        h_II = stats[SecondMoment].mean()
        is_dead_I = h_II.diagonal() == 0
        w_OI = torch.where(is_dead_I, torch.zeros_like(w_OI), w_OI)
        scale_OG, zero_point_OG = choose_scale(w_OI, scheme, scale_dtype, choice=self.scale, h_II=h_II)
        order = (
            torch.argsort(h_II.diagonal(), descending=True, stable=True)
            if self.act_order
            else torch.arange(w_OI.shape[1])
        )
        order = order.to(w_OI.device)
        factor_II, damping = inverse_factor(h_II[order][:, order], damping=self.damping)
        codes_OI = round_columns(
            w_OI,
            order,
            factor_II,
            scheme,
            scheme.by_row(scale_OG, len(w_OI)),
            zero_point_OG,
            block_size=self.block_size,
        )
        facts = {"damping": damping, "dead_inputs": int(is_dead_I.sum())}
        return Rounded(QuantizedWeight(scheme, codes_OI, scale_OG, zero_point_OG), facts)


def inverse_factor(h_II: Tensor, *, damping: float) -> tuple[Tensor, float]:
    """Return the upper triangular U with U^T U = (H + d I)^-1, and the share d / mean(diag H) that made it
    possible.

    Raises:
        UsageError: H is not positive definite even with the largest damping: activations hold NaN or inf.
    """
    h_II = h_II.clone()
    diagonal = h_II.diagonal()
    is_dead_I = diagonal == 0
    mean = diagonal[~is_dead_I].mean() if bool((~is_dead_I).any()) else torch.ones((), device=h_II.device)
    diagonal[is_dead_I] = mean
    for multiple in DAMPING_LADDER:
        share = min(1.0, damping * multiple)
        damped = h_II + torch.eye(h_II.shape[0], device=h_II.device) * (share * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed == 0:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if failed == 0 and bool(torch.isfinite(upper).all()):
                return upper, share
    raise UsageError(
        "the second moment of a layer's inputs cannot be factorised even with the largest damping: the "
        "calibration data drives the model to NaN or infinity. Check the checkpoint, or compute in float32."
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
    """Return codes [O, I] in the original order of columns; `factor_II` is in the order of processing,
    `order` [I]."""
    out_features, in_features = w_OI.shape
    group_of = order // (in_features // scale_OG.shape[1])
    scale_IO = scale_OG.to(torch.float32).t()[group_of].contiguous()
    zero_IO = None if zero_point_OG is None else zero_point_OG.to(torch.float32).t()[group_of].contiguous()
    w_IO = w_OI.t()[order].contiguous()
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
    codes_bytes_OI = codes_IO.t().to(scheme.code_dtype).view(torch.int8)
    codes_OI.view(torch.int8)[:, order] = (
        codes_bytes_OI  # not every device can index e4m3, all can index bytes
    )
    return codes_OI
