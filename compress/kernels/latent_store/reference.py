"""Reference of the steps between the linears of latent attention (arXiv 2405.04434) and its products: the
rotation of queries, and the latents of a position written to the cache, with the dimensions of its keys that
rotate. Where a layer reads the latents of an earlier one, there are queries only.

Each step rounds to the model's dtype, as the canonical decoder does. Dimensions that rotate come last in a
head and are stored as two halves that turn with one another (`models/rope.py`).

Shapes: T rows, H heads, C head dimension, R numbers of a latent, P dimensions that rotate, L positions.
"""

import torch
from torch import Tensor

from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.operands.rows import ActivationQuant, RowNorm, quantize
from compress.kernels.rms_norm.reference import rms_norm
from compress.kernels.select import Kernel, anything, register
from compress.models.latent import Latent
from compress.models.rope import rotate


def latent_store(
    q_TF: Tensor,
    latent_TF: Tensor | None,
    norm: RowNorm | None,
    cos_LP: Tensor,
    sin_LP: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    pages: PagedLatents,
    *,
    latent: Latent,
    head_dim: int,
    quant: ActivationQuant | None = None,
) -> Tensor:
    """Return the rotated queries [T, H, C] of q [T, H C], and write the T rows of the cache: the latents
    normed, and rounded as the linear that reads them rounds its inputs, and what follows them in `latent_TF`
    [T, R + P] rotated. Without latents and their norm nothing is written."""
    cos_TP, sin_TP = (each[positions_T] for each in (cos_LP, sin_LP))
    still_THN, turning_THP = q_TF.unflatten(1, (-1, head_dim)).split(
        [head_dim - latent.rope_dim, latent.rope_dim], dim=-1
    )
    q_THC = torch.cat((still_THN, rotate(latent.paired(turning_THP), cos_TP, sin_TP)), dim=-1)
    if latent_TF is None or norm is None:
        return q_THC
    latent_TR, shared_TP = latent_TF.split([latent.kv_rank, latent.rope_dim], dim=1)
    turned_TP = rotate(latent.paired(shared_TP).unsqueeze(1), cos_TP, sin_TP).squeeze(1)
    normed_TR = rms_norm(latent_TR, norm.weight, norm.eps)
    if quant is not None:
        normed_TR = quantize(normed_TR, quant).dequantize(normed_TR.dtype)
    pages.write_(slots_T, torch.cat((normed_TR, turned_TP), dim=1))
    return q_THC


register(Kernel("latent_store", "reference", min_sm=0, priority=0, supports=anything, fn=latent_store))
