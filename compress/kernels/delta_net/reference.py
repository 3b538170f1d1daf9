"""Reference of a gated delta net (arXiv 2412.06464) between its linears: the convolution, the recurrence over
the states of sequences, and the gated norm of each head.

Row after row, each with tensors of the same shapes, so that the bits of a row depend on its sequence alone,
and are the same however many rows a pass has of it. Numbers are rounded where the canonical decoder rounds
them.

Shapes: T rows, F channels of the convolution and after them Z = H V of the gate, H value heads, G key heads,
D decays (`DeltaWeights`), K key dimension, V value dimension, W positions of the convolution.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.delta_net.gates import delta_of, gate_factor, gates_of
from compress.kernels.operands.recurrent_states import DeltaWeights, RecurrentStates, Sequences
from compress.kernels.rms_norm.reference import rms_norm
from compress.kernels.select import Kernel, anything, register
from compress.models.delta_net import log_decays, of_length_one


def delta_net(
    qkv_gate_TF: Tensor,
    beta_decay_TH: Tensor,
    weights: DeltaWeights,
    states: RecurrentStates,
    sequences: Sequences,
    *,
    gate_TZ: Tensor | None = None,
) -> Tensor:
    """Return the gated outputs [T, Z] from queries, keys, values and gates [T, F + Z], and from the linears
    of beta and decay [T, H + D], float32; the slots of the sequences are written. `gate_TZ` are gates that
    another linear computes."""
    delta = delta_of(states)
    gate_TZ = gates_of(delta, qkv_gate_TF, gate_TZ)
    out_TZ = qkv_gate_TF.new_empty(gate_TZ.shape)
    saving = states.saving if sequences.chunks_C4 is not None else None
    row = 0
    for idx, length in enumerate(sequences.query_lens):
        first = sequences.context_lens_R[idx] - length
        slot = sequences.slots_R[idx]
        state_HVK = states.at(states.heads, slot, first - 1)
        for offset in range(length):
            position = first + offset
            inputs_F = qkv_gate_TF[row, : delta.num_channels]
            states.keep(states.inputs, slot, position, inputs_F.to(torch.float32))
            mixed_F = _convolved(weights.conv_FW, states, slot, position)
            beta_H, decay_D = beta_decay_TH[row].split([delta.num_heads, delta.num_decays])
            out_HV, state_HVK = _step(states, mixed_F, beta_H, decay_D, weights, state_HVK)
            states.keep(states.heads, slot, position, state_HVK)
            if saving is not None and position + 1 == saving.wanted_S2[slot.long(), 0]:
                states.save(int(slot), int(position) + 1)
            normed_HV = rms_norm(out_HV.to(out_TZ.dtype), weights.norm_V, weights.norm_eps)
            factor_Z = gate_factor(delta, gate_TZ[row])
            out_TZ[row] = (normed_HV.flatten() * factor_Z).to(out_TZ.dtype)
            row += 1
    return out_TZ


def _convolved(conv_FW: Tensor, states: RecurrentStates, slot: Tensor, position: Tensor) -> Tensor:
    """Return silu of the convolution that ends at a position [F], whose inputs are in the slot."""
    width = conv_FW.shape[1]
    total_F = torch.zeros_like(conv_FW[:, 0], dtype=torch.float32)
    for tap in range(width):
        past_F = states.at(states.inputs, slot, position - width + 1 + tap)
        total_F = total_F + past_F * conv_FW[:, tap].to(torch.float32)
    return F.silu(total_F.to(conv_FW.dtype))


def _step(
    states: RecurrentStates,
    mixed_F: Tensor,
    beta_H: Tensor,
    decay_D: Tensor,
    weights: DeltaWeights,
    state_HVK: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of the heads [H, V], float32, and the state after a position."""
    delta = delta_of(states)
    q_F, k_F, v_F = mixed_F.split([delta.key_size, delta.key_size, delta.value_size])
    repeat = delta.num_heads // delta.num_key_heads
    q_HK, k_HK = (
        of_length_one(each.view(-1, delta.key_dim)).repeat_interleave(repeat, dim=0) for each in (q_F, k_F)
    )
    v_HV = v_F.view(-1, delta.value_dim).to(torch.float32)
    log_decay_HD = log_decays(delta, decay_D, weights.dt_bias_D, weights.decay_rate_H)
    state_HVK = state_HVK * log_decay_HD.exp().unsqueeze(1)
    held_HV = (state_HVK * k_HK.unsqueeze(1)).sum(-1)
    beta_H1 = weights.beta_factor * torch.sigmoid(beta_H).unsqueeze(-1)
    update_HV = beta_H1 * (v_HV - held_HV)
    state_HVK = state_HVK + k_HK.unsqueeze(1) * update_HV.unsqueeze(-1)
    return (state_HVK * (q_HK * delta.key_dim**-0.5).unsqueeze(1)).sum(-1), state_HVK


register(Kernel("delta_net", "reference", min_sm=0, priority=0, supports=anything, fn=delta_net))
