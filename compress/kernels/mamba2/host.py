"""A Mamba-2 mixer between its linears on a CPU, in PyTorch's operators.

A few rows of a sequence, and its last ones that leave states of their own, go one after the other; the rows
before them go in chunks (`models/mamba2.py`).

Shapes: T rows, F channels of the convolution (C, B and x) and after them Z = H V of the gate and H of dt, H
heads, K state size, V dimension of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.mamba2.reference import gated_norm
from compress.kernels.operands.recurrent_states import MambaWeights, RecurrentStates, Sequences
from compress.kernels.problem import Problem
from compress.kernels.recurrence.host import Part, run_parts
from compress.kernels.select import Kernel, register
from compress.models.mamba2 import state_space_scan


def mamba2(rows_TF: Tensor, weights: MambaWeights, states: RecurrentStates, sequences: Sequences) -> Tensor:
    """Return the gated and normed outputs [T, Z], and write the slots of the sequences (`select.py`)."""
    out_TZ = rows_TF.new_empty(len(rows_TF), states.recurrence.value_size)

    def run(part: Part, rows: slice) -> None:
        out_TZ[rows] = _gated(part, weights, rows_TF[rows])

    run_parts(states, sequences, run)
    return out_TZ


def _gated(part: Part, weights: MambaWeights, rows_TF: Tensor) -> Tensor:
    """Return the gated and normed outputs of a part [T, Z]."""
    mamba = part.states.recurrence
    sizes = [mamba.num_channels, mamba.value_size, mamba.num_heads]
    inputs_TF, gate_TZ, dt_TH = rows_TF[:, : sum(sizes)].split(sizes, dim=1)
    mixed_TF = part.convolved(inputs_TF, weights.conv_FW, weights.conv_bias_F)
    c_TF, b_TF, x_TF = mixed_TF.to(torch.float32).split(
        [mamba.key_size, mamba.key_size, mamba.value_size], dim=1
    )
    repeat = mamba.num_heads // mamba.num_key_heads
    c_THK, b_THK = (
        each.unflatten(1, (-1, mamba.key_dim)).repeat_interleave(repeat, dim=1) for each in (c_TF, b_TF)
    )
    x_THV = x_TF.unflatten(1, (-1, mamba.value_dim))
    dt_TH = F.softplus(dt_TH.to(torch.float32) * weights.dt_factor + weights.dt_bias_H)
    operands = c_THK, b_THK, x_THV * dt_TH.unsqueeze(-1), weights.decay_rate_H * dt_TH
    out_THV = (_step if part.length == 1 else _chunks)(part, *operands)
    return gated_norm((out_THV + weights.skip_H.unsqueeze(-1) * x_THV).flatten(1), gate_TZ, weights)


def _step(part: Part, c_THK: Tensor, b_THK: Tensor, added_THV: Tensor, log_decay_TH: Tensor) -> Tensor:
    """Return what C of one row finds in the state after it [1, H, V], which is kept."""
    state_HVK = part.after
    torch.mul(part.before, log_decay_TH.exp().view(-1, 1, 1), out=state_HVK)
    state_HVK.baddbmm_(added_THV[0].unsqueeze(-1), b_THK[0].unsqueeze(-2))
    return torch.bmm(state_HVK, c_THK[0].unsqueeze(-1)).squeeze(-1).unsqueeze(0)


def _chunks(part: Part, c_THK: Tensor, b_THK: Tensor, added_THV: Tensor, log_decay_TH: Tensor) -> Tensor:
    """Return the outputs of many rows [T, H, V], and keep the state after the last."""
    c_BTHK, b_BTHK, added_BTHV, log_decay_BTH, before_BHKV = (
        each.unsqueeze(0) for each in (c_THK, b_THK, added_THV, log_decay_TH, part.before.mT)
    )
    out_BTHV, state_BHKV = state_space_scan(c_BTHK, b_BTHK, added_BTHV, log_decay_BTH, before_BHKV)
    part.after.copy_(state_BHKV[0].mT)
    return out_BTHV[0]


def _supports(problem: Problem) -> str | None:
    return None if problem.device == "cpu" else "for a CPU"


register(Kernel("mamba2", "host", min_sm=0, priority=2, supports=_supports, fn=mamba2))
