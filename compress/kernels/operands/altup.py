"""The weights of the alternating updates of a layer (`models/altup.py`) as kernels read them, and the
function r of a row that predicts and corrects the streams.

    r(x) = tanh(W_r norm(x) / D),   norm(x) rounded to the dtype of x, the rest in float32

Shapes: T rows, n streams, D hidden.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from compress.kernels.act_mul.reference import in_whole_vectors
from compress.kernels.compilers.triton import jit, tl, triton, triton_refusal
from compress.kernels.linear.row_product import ColumnBlocks, column_blocks, row_product
from compress.kernels.operands.rows import RowNorm
from compress.kernels.problem import Problem
from compress.kernels.rms_norm.fused import normed_row
from compress.kernels.rms_norm.reference import rms_norm

ROWS = 4
"""Rows of a tile of the reference's product."""
MOST_NUMBERS = 32_768
"""Numbers of all streams of a row that one program of 1024 threads keeps in registers."""
MOST_STREAMS = 8
"""The most streams that a program unrolls."""


@dataclass(frozen=True)
class AltUpWeights:
    """The parameters of the alternating updates of a layer. The norm and the router [n, D] have the dtype of
    rows, `predict_OI` [n^2, n] and `correct_OI` [n, n] are float32. `scale_D` multiplies the first stream
    where the layer reads it for the embeddings of tokens."""

    norm: RowNorm
    router_nD: Tensor
    predict_OI: Tensor
    correct_OI: Tensor
    scale_D: Tensor

    @property
    def num_streams(self) -> int:
        """The streams of a token, n."""
        return len(self.correct_OI)

    @cached_property
    def blocks(self) -> ColumnBlocks:
        """The router as products of single rows read it, in float32."""
        return column_blocks(self.router_nD.to(torch.float32))

    @property
    def weight_bytes(self) -> int:
        """The bytes that a step reads: every program reads the router and the norm, for both updates."""
        router = 2 * (self.router_nD.numel() + self.norm.weight.numel()) * self.router_nD.element_size()
        small = sum(each.numel() * each.element_size() for each in (self.predict_OI, self.correct_OI))
        return router + small + self.scale_D.numel() * self.scale_D.element_size()


def routed(x_TD: Tensor, altup: AltUpWeights) -> Tensor:
    """Return r of rows, float32 [T, n]. The bits of a row do not depend on the others."""
    normed_TD = rms_norm(x_TD, altup.norm.weight, altup.norm.eps).to(torch.float32)
    logits_Tn = row_product(normed_TD, altup.blocks, rows=ROWS)
    return in_whole_vectors(torch.tanh, logits_Tn * x_TD.shape[1] ** -1.0)


def altup_refusal(problem: Problem) -> str | None:
    """Refuse a problem whose streams no program keeps in registers: of `problem.k` streams of `problem.n`
    numbers."""
    if refusal := triton_refusal(problem):
        return refusal
    numbers = triton.next_power_of_2(problem.n) * max(problem.k, 1)
    if numbers > MOST_NUMBERS or problem.k > MOST_STREAMS:
        return (
            f"holds all streams of a row in registers, at most {MOST_STREAMS} of {MOST_NUMBERS} numbers "
            f"together, not {problem.k} of {problem.n}"
        )
    return None


@jit()
def routed_row(
    x: tl.tensor, norm: tl.tensor, router: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr
) -> tl.tensor:
    """Return r [N2] of a row x [BLOCK] by the matrix `router` [N2, BLOCK], 0 beyond its streams."""
    normed = normed_row(x, norm, eps, SIZE, False).to(tl.float32)
    logits = tl.sum(router.to(tl.float32) * normed[None, :], axis=1) * (1 / SIZE)
    # Odd, and exact near 0: 1 - 2 / (e^2|u| + 1) would cancel there.
    u = tl.abs(logits)
    square = u * u
    series = u * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    size = tl.where(u < 0.2, series, 1 - 2 / (tl.exp(2 * u) + 1))
    return tl.where(logits < 0, -size, size)


@jit()
def number_of(x: tl.tensor, idx: tl.constexpr) -> tl.tensor:
    """Return one number of a short vector."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0]) == idx, x, 0.0), axis=0)


@jit()
def magnitude(x: tl.tensor, smallest: tl.constexpr, SIZE: tl.constexpr) -> tl.tensor:
    """Return the root of the mean square of a row x [BLOCK], float32, of at least `smallest` as a square."""
    return tl.sqrt_rn(tl.maximum(tl.sum(x * x, axis=0) / SIZE, smallest))


@jit()
def matched_row(x: tl.tensor, size: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Return a row x [BLOCK], float32, with the root mean square `size`."""
    return tl.div_rn(x * size, magnitude(x, 1e-5, SIZE))  # models.altup.SMALLEST_MEAN_SQUARE
