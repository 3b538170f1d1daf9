"""The recurrence of a Mamba-1 mixer on a CPU, in PyTorch's operators.

A few rows of a sequence, and its last ones that leave states of their own, go one after the other; of the
rows before them the factors of many are computed at once (`models/mamba1.py`).

Shapes: T rows, V channels, K numbers of the state of a channel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.recurrent_states import RecurrentStates, Sequences
from compress.kernels.operands.selective import ScanRows, ScanWeights
from compress.kernels.problem import Problem
from compress.kernels.recurrence.host import Part, run_parts
from compress.kernels.select import Kernel, register
from compress.kernels.selective_scan.reference import scan_step
from compress.models import mamba1


def selective_scan(
    x_TV: Tensor,
    gate_TV: Tensor,
    dt_TV: Tensor,
    bc_TK: Tensor,
    weights: ScanWeights,
    states: RecurrentStates,
    sequences: Sequences,
) -> Tensor:
    """Return the gated outputs [T, V], and write the states of the sequences (`select.py`)."""
    out_TV = torch.empty_like(x_TV, memory_format=torch.contiguous_format)
    operands = [each.to(torch.float32).contiguous() for each in (x_TV, gate_TV, dt_TV, bc_TK)]

    def run(part: Part, rows: slice) -> None:
        own = ScanRows(*(each[rows] for each in operands))
        if part.length == 1:
            out_V, state_VK = scan_step(ScanRows(*(each[0] for each in own)), weights, part.before[0])
            found_TV = out_V.unsqueeze(0)
        else:
            found_TV, state_VK = _many(own, weights, part.before[0])
        out_TV[rows] = found_TV.to(out_TV.dtype)
        part.after[0] = state_VK

    run_parts(states, sequences, run, save=states.save_heads)  # `short_conv` saves the inputs
    return out_TV


def _many(rows: ScanRows, weights: ScanWeights, state_VK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gated outputs of many rows [T, V] and the state after the last."""
    dt_TV = F.softplus(rows.dt_TV + weights.dt_bias_V)
    b_BTK, c_BTK = rows.bc_TK.unsqueeze(0).chunk(2, dim=-1)
    found_BTV, state_BVK = mamba1.selective_scan(
        rows.x_TV.unsqueeze(0), dt_TV.unsqueeze(0), weights.decay_rate_VK, b_BTK, c_BTK, state_VK.unsqueeze(0)
    )
    return (found_BTV[0] + weights.skip_V * rows.x_TV) * F.silu(rows.gate_TV), state_BVK[0]


def _supports(problem: Problem) -> str | None:
    return None if problem.device == "cpu" else "for a CPU"


register(Kernel("selective_scan", "host", min_sm=0, priority=2, supports=_supports, fn=selective_scan))
