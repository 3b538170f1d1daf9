"""Reference of the keys and values of all heads of latent attention (arXiv 2405.04434), as prefill attention
reads them from pages.

Shapes: M positions, H heads, C head dimension, N of its dimensions that do not rotate and P that do, V
dimensions of a value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.select import Kernel, anything, register
from compress.models.latent import Latent


def latent_heads(
    kv_MF: Tensor, rotated_MP: Tensor, k_HMC: Tensor, v_HMC: Tensor, *, latent: Latent, head_dim: int
) -> None:
    """Write keys and values [H, M, C] of the outputs of the linear of latents [M, H (N + V)] and the rotated
    dimensions that all keys share. Zeros fill the values up to C."""
    still_dim = head_dim - latent.rope_dim
    heads_HMF = kv_MF.unflatten(1, (-1, still_dim + latent.value_dim)).transpose(0, 1)
    still_HMN, values_HMV = heads_HMF.split([still_dim, latent.value_dim], dim=-1)
    shared_HMP = rotated_MP.expand(len(heads_HMF), -1, -1)
    k_HMC.copy_(torch.cat((still_HMN, shared_HMP), dim=-1))
    v_HMC.copy_(F.pad(values_HMV, (0, head_dim - latent.value_dim)))


register(Kernel("latent_heads", "reference", min_sm=0, priority=0, supports=anything, fn=latent_heads))
