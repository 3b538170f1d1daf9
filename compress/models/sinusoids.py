"""Sinusoidal embeddings of positions, which no checkpoint stores (XGLM, arXiv 2112.10668).

    r = p + offset
    e(p) = [sin(r f_0), ..., sin(r f_(n-1)), cos(r f_0), ..., cos(r f_(n-1))]
    f_i = 10000^(-i / (n - 1)),  n = D / 2

Sines come first and cosines after them, and the last frequency is 1 / 10000, as in tensor2tensor; "Attention
Is All You Need" (arXiv 1706.03762) lets the two take turns, and divides by n. All is computed in float32.

Shapes: S positions, D hidden.
"""

import math

import torch
from torch import Tensor, nn

from compress.models.arch import Arch
from compress.models.hyper_connection import repeated

_LONGEST = 10000.0


def sinusoids(arch: Arch, positions: Tensor) -> Tensor:
    """Return the embeddings [..., D] of positions [...], float32."""
    assert arch.position_offset is not None
    half = arch.hidden_size // 2
    powers = torch.arange(half, dtype=torch.float32, device=positions.device)
    frequencies = torch.exp(powers * -(math.log(_LONGEST) / (half - 1)))
    angles = (positions + arch.position_offset).to(torch.float32).unsqueeze(-1) * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def sinusoid_table(arch: Arch) -> Tensor:
    """Return the embeddings [N, D] of all positions of a model, float32 on the CPU."""
    return sinusoids(arch, torch.arange(arch.max_position))


class SinusoidalPositions(nn.Module):
    """Sinusoidal embeddings of positions, once for each stream of the residual; it has no parameters."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.arch = arch

    def forward(self, positions: Tensor) -> Tensor:
        return repeated(self.arch.hyper, sinusoids(self.arch, positions))
