"""Reference gated activation (arXiv 2002.05202): activation(gate) * up, where gate and up are the halves of one fused projection."""

from torch import Tensor

from compress.kernels.select import Kernel, anything, register
from compress.models.decoder import activation


def act_mul(gate_up_TF: Tensor, activation_name: str) -> Tensor:
    """[T, 2 F] -> [T, F]."""
    gate, up = gate_up_TF.chunk(2, dim=-1)
    return activation(activation_name, gate) * up


register(Kernel("act_mul", "reference", min_sm=0, rank=0, supports=anything, fn=act_mul))
