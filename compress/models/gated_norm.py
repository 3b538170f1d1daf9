"""A norm whose output is multiplied by gates that are computed of it (A.X K2, SK Telecom 2026).

    y = norm(x),   gated_norm(x) = y * sigmoid(gate_out(silu(gate_in(y))))

Norms before attention, and before experts, have gates in layers with a `LayerShape.norm_gate_rank` R; the
norm before a dense FFN has none. No scheme quantizes the two linears.

Shapes: D hidden, R the rank of the gates.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.models.arch import Arch
from compress.models.linear import Linear
from compress.models.norms import Norm, UnitNorm, norm_of


class GatedNorm(nn.Module):
    """A norm of the stream by its canonical name, and the linears of its gates."""

    def __init__(self, arch: Arch, name: str, rank: int) -> None:
        super().__init__()
        self.norm = norm_of(arch, arch.hidden_size, name)
        self.gate_in = Linear(arch.hidden_size, rank, bias=False)
        self.gate_out = Linear(rank, arch.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        gate = torch.sigmoid(self.gate_out(F.silu(self.gate_in(normed))).to(torch.float32))
        return (normed * gate).to(normed.dtype)


def stream_norm_of(arch: Arch, name: str, rank: int) -> Norm | UnitNorm | GatedNorm:
    """Return a norm before a half of a layer by its canonical name, with gates of that rank; 0 for none."""
    return GatedNorm(arch, name, rank) if rank else norm_of(arch, arch.hidden_size, name)
