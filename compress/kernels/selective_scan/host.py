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
from compress.kernels.recurrence.chunking import parts
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
    rows = ScanRows(*(each.to(torch.float32).contiguous() for each in (x_TV, gate_TV, dt_TV, bc_TK)))
    is_prompt = sequences.chunks_C4 is not None
    start = 0
    lens = sequences.context_lens_R.tolist()
    slots = sequences.slots_R.tolist()
    for slot, context_len, length in zip(slots, lens, sequences.query_lens, strict=False):
        first = context_len - length
        wanted = 0
        if is_prompt and states.saving is not None:
            wanted = int(states.saving.wanted_S2[slot, 0])
        state_VK = _state(states, slot, first)
        for begin, end in parts(length, states.num_kept, wanted - first):
            part = ScanRows(*(each[start + begin : start + end] for each in rows))
            if end - begin == 1:
                out_V, state_VK = scan_step(ScanRows(*(each[0] for each in part)), weights, state_VK)
                out_TV[start + begin] = out_V.to(out_TV.dtype)
            else:
                found_TV, state_VK = _many(part, weights, state_VK)
                out_TV[start + begin : start + end] = found_TV.to(out_TV.dtype)
            if first + end > 0:  # rows that fill up a step come before the first
                states.heads[slot, (first + end - 1) % states.num_kept, 0] = state_VK
            if 0 < wanted == first + end:
                states.save_heads(slot, wanted)
        start += length
    return out_TV


def _state(states: RecurrentStates, slot: int, num_tokens: int) -> Tensor:
    """Return the state [V, K] that a slot has after so many tokens."""
    if num_tokens <= 0:
        return torch.zeros_like(states.heads[slot, 0, 0])
    return states.heads[slot, (num_tokens - 1) % states.num_kept, 0]


def _many(rows: ScanRows, weights: ScanWeights, state_VK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gated outputs of many rows [T, V] and the state after the last."""
    dt_TV = F.softplus(rows.dt_TV + weights.dt_bias_V)
    operands = (each.unsqueeze(0) for each in (rows.x_TV, dt_TV))
    b_BTK, c_BTK = rows.bc_TK.unsqueeze(0).chunk(2, dim=-1)
    found_BTV, state_BVK = mamba1.selective_scan(
        *operands, weights.decay_rate_VK, b_BTK, c_BTK, state_VK.unsqueeze(0)
    )
    return (found_BTV[0] + weights.skip_V * rows.x_TV) * F.silu(rows.gate_TV), state_BVK[0]


def _supports(problem: Problem) -> str | None:
    return None if problem.device == "cpu" else "for a CPU"


register(Kernel("selective_scan", "host", min_sm=0, priority=2, supports=_supports, fn=selective_scan))
