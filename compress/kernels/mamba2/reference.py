"""Reference of a Mamba-2 mixer (arXiv 2405.21060) between its linears: the convolution, the recurrence over
the states of sequences, and the gated norm of all heads.

Row after row, each with tensors of the same shapes, so that the bits of a row depend on its sequence alone,
and are the same however many rows a pass has of it. Numbers are rounded where the canonical decoder rounds
them.

Shapes: T rows, F channels of the convolution (C, B and x) and after them Z = H V of the gate and H of dt, H
heads, G groups, K state size, V dimension of a head, W positions of the convolution.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.recurrent_states import MambaWeights, RecurrentStates, Sequences
from compress.kernels.select import Kernel, anything, register


def mamba2(rows_TF: Tensor, weights: MambaWeights, states: RecurrentStates, sequences: Sequences) -> Tensor:
    """Return the gated and normed outputs [T, Z] from C, B, x, gates and dt [T, F + Z + H or more]; the
    slots of the sequences are written."""
    widths = states.recurrence
    out_TZ = rows_TF.new_empty(len(rows_TF), widths.value_size)
    saving = states.saving if sequences.chunks_C4 is not None else None
    sizes = [widths.num_channels, widths.value_size, widths.num_heads]
    row = 0
    for idx, length in enumerate(sequences.query_lens):
        first = sequences.context_lens_R[idx] - length
        slot = sequences.slots_R[idx]
        state_HVK = states.at(states.heads, slot, first - 1)
        for offset in range(length):
            position = first + offset
            inputs_F, gate_Z, dt_H = rows_TF[row, : sum(sizes)].split(sizes)
            states.keep(states.inputs, slot, position, inputs_F.to(torch.float32))
            mixed_F = _convolved(weights, states, slot, position, rows_TF.dtype)
            out_HV, state_HVK = _step(states, mixed_F, dt_H, weights, state_HVK)
            states.keep(states.heads, slot, position, state_HVK)
            if saving is not None and position + 1 == saving.wanted_S2[slot.long(), 0]:
                states.save(int(slot), int(position) + 1)
            out_TZ[row] = gated_norm(out_HV.view(1, -1), gate_Z.view(1, -1), weights)[0]
            row += 1
    return out_TZ


def gated_norm(out_TZ: Tensor, gate_TZ: Tensor, weights: MambaWeights) -> Tensor:
    """Return float32 outputs times the silu of their gates, of which each part is then normed if there is a
    norm, in the dtype of the gates."""
    gated_TZ = out_TZ * F.silu(gate_TZ.to(torch.float32) * weights.gate_factor)
    if weights.norm_Z is None:
        return gated_TZ.to(gate_TZ.dtype)
    parts_TGZ = gated_TZ.unflatten(1, (weights.norm_groups, -1))
    normed = parts_TGZ * torch.rsqrt(parts_TGZ.square().mean(-1, keepdim=True) + weights.norm_eps)
    return (weights.norm_Z.to(torch.float32) * normed.flatten(1)).to(gate_TZ.dtype)


def _convolved(
    weights: MambaWeights, states: RecurrentStates, slot: Tensor, position: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return silu of the convolution that ends at a position [F], whose inputs are in the slot, in float32
    after a rounding to the model's dtype."""
    conv_FW = weights.conv_FW
    width = conv_FW.shape[1]
    total_F = torch.zeros_like(conv_FW[:, 0], dtype=torch.float32)
    for tap in range(width):
        past_F = states.at(states.inputs, slot, position - width + 1 + tap)
        total_F = total_F + past_F * conv_FW[:, tap].to(torch.float32)
    if weights.conv_bias_F is not None:
        total_F = total_F + weights.conv_bias_F.to(torch.float32)
    return F.silu(total_F.to(dtype)).to(torch.float32)


def _step(
    states: RecurrentStates, mixed_F: Tensor, dt_H: Tensor, weights: MambaWeights, state_HVK: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs of the heads [H, V], float32, and the state after a position."""
    widths = states.recurrence
    c_F, b_F, x_F = mixed_F.split([widths.key_size, widths.key_size, widths.value_size])
    repeat = widths.num_heads // widths.num_key_heads
    c_HK, b_HK = (each.view(-1, widths.key_dim).repeat_interleave(repeat, dim=0) for each in (c_F, b_F))
    x_HV = x_F.view(-1, widths.value_dim)
    dt_H = F.softplus(dt_H.to(torch.float32) * weights.dt_factor + weights.dt_bias_H)
    kept_H = (weights.decay_rate_H * dt_H).exp()
    added_HV = x_HV * dt_H.unsqueeze(-1)
    state_HVK = state_HVK * kept_H.view(-1, 1, 1) + b_HK.unsqueeze(1) * added_HV.unsqueeze(-1)
    out_HV = (state_HVK * c_HK.unsqueeze(1)).sum(-1)
    return out_HV + weights.skip_H.unsqueeze(-1) * x_HV, state_HVK


register(Kernel("mamba2", "reference", min_sm=0, priority=0, supports=anything, fn=mamba2))
