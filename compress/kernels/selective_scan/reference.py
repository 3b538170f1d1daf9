"""Reference of the recurrence of a Mamba-1 mixer (arXiv 2312.00752) over the states of sequences, with its
gate.

Row after row, each with tensors of the same shapes, so that the bits of a row depend on its sequence alone,
and are the same however many rows a pass has of it. Numbers are rounded where the canonical decoder rounds
them.

Shapes: T rows, V channels, K numbers of the state of a channel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.recurrent_states import RecurrentStates, Sequences
from compress.kernels.operands.selective import ScanRows, ScanWeights
from compress.kernels.select import Kernel, anything, register


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
    rows = ScanRows(x_TV, gate_TV, dt_TV, bc_TK)
    out_TV = torch.empty_like(x_TV, memory_format=torch.contiguous_format)
    saving = states.saving if sequences.chunks_C4 is not None else None
    row = 0
    for idx, length in enumerate(sequences.query_lens):
        first = sequences.context_lens_R[idx] - length
        slot = sequences.slots_R[idx]
        state_VK = states.at(states.heads, slot, first - 1)[0]
        for offset in range(length):
            position = first + offset
            operands = (each[row].to(torch.float32) for each in rows)
            out_V, state_VK = scan_step(ScanRows(*operands), weights, state_VK)
            out_TV[row] = out_V.to(out_TV.dtype)
            states.keep(states.heads, slot, position, state_VK.unsqueeze(0))
            if saving is not None and position + 1 == saving.wanted_S2[slot.long(), 0]:
                states.save_heads(int(slot), int(position) + 1)
            row += 1
    return out_TV


def scan_step(row: ScanRows, weights: ScanWeights, state_VK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gated outputs of one row [V] and the state after it, float32, from operands in float32."""
    x_V, gate_V, dt_V, bc_K = row
    b_K, c_K = bc_K.chunk(2)
    dt_V = F.softplus(dt_V + weights.dt_bias_V)
    kept_VK = (weights.decay_rate_VK * dt_V.unsqueeze(-1)).exp()
    state_VK = state_VK * kept_VK + (x_V * dt_V).unsqueeze(-1) * b_K
    out_V = (state_VK * c_K).sum(-1) + weights.skip_V * x_V
    return out_V * F.silu(gate_V), state_VK


register(Kernel("selective_scan", "reference", min_sm=0, priority=0, supports=anything, fn=selective_scan))
