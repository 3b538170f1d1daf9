"""Reference of the beginning of a half-layer with gated residuals (`models/gated_residual.py`): the norms of
the streams, their gates and their mixture, and the factors of the output. Products and functions of single
numbers have one shape, so that a row depends on nothing but the row (`row_product`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compress.kernels.act_mul.reference import in_whole_vectors
from compress.kernels.linear.tiles import (
    DECODE_ROWS,
    PREFILL_ROWS,
    DenseWeight,
    dequantized,
    linear_in_tiles,
    tile_refusal,
)
from compress.kernels.operands.rows import RowNorm
from compress.kernels.rms_norm.reference import rms_norm
from compress.kernels.select import Kernel, register
from compress.models.gated_residual import gated_mean, gates_of, injections_of
from compress.quant.scheme import QuantizedWeight


@dataclass(frozen=True)
class GatedBlocks:
    """W_down, W_up and W_q, which the head has not, cut for products of rows."""

    down: DenseWeight
    up: DenseWeight
    inject: DenseWeight | None


def repack(
    weights: Sequence[Tensor | QuantizedWeight], *, dtype: torch.dtype, device: torch.device, gated: bool
) -> GatedBlocks:
    """Return the matrices of W_down, W_up and, unless they are those of the head, W_q."""
    down, up, *inject = (dequantized([each], dtype=dtype, device=device, gated=gated) for each in weights)
    return GatedBlocks(down, up, inject[0] if inject else None)


def gated_mix(
    streams_TE: Tensor, packed: GatedBlocks, norm: RowNorm, *, rows: int
) -> tuple[Tensor, Tensor | None]:
    """Return the mixture of the streams [T, D], and the factors by which the output of the half-layer is
    added to each stream, float32 [T, n]; None for the head. The weights [n, D] of the norm are float32."""
    n = len(norm.weight)

    def product(x_TI: Tensor, weight: DenseWeight) -> Tensor:
        return linear_in_tiles(x_TI, weight, None, rows=rows, out_dtype=torch.float32)

    normed_TE = rms_norm(streams_TE.unflatten(-1, (n, -1)), norm.weight, norm.eps).flatten(-2)
    low_TR = in_whole_vectors(partial(gates_of, num_streams=n), product(normed_TE, packed.down))
    gates_TE = in_whole_vectors(torch.sigmoid, product(low_TR.to(streams_TE.dtype), packed.up))
    mixed_TD = gated_mean(normed_TE.to(torch.float32), gates_TE, n).to(streams_TE.dtype)
    if packed.inject is None:
        return mixed_TD, None
    logits_Tn = product(normed_TE, packed.inject)
    return mixed_TD, in_whole_vectors(partial(injections_of, num_streams=n), logits_Tn).contiguous()


def _register(name: str, rows: int, *, few_rows: bool, device: str | None) -> None:
    register(
        Kernel(
            "gated_mix",
            name,
            min_sm=0,
            priority=0,
            supports=partial(tile_refusal, few_rows=few_rows, device=device),
            fn=partial(gated_mix, rows=rows),
            repack=repack,
        )
    )


_register("reference", DECODE_ROWS, few_rows=True, device=None)
for _device, _rows in PREFILL_ROWS.items():
    _register(f"reference.tile{_rows}", _rows, few_rows=False, device=_device)
