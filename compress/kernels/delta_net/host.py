"""A gated delta net between its linears on a CPU, in PyTorch's operators.

A few rows of a sequence, and its last ones that leave states of their own, go one after the other; the rows
before them go in chunks (`models/delta_net.py`).

Shapes: T rows, F channels of the convolution and after them Z = H V of the gate, H value heads, G key heads,
D decays (`DeltaWeights`), K key dimension, V value dimension.
"""

import torch
from torch import Tensor

from compress.kernels.delta_net.gates import delta_of, gate_factor, gates_of
from compress.kernels.operands.recurrent_states import DeltaWeights, RecurrentStates, Sequences
from compress.kernels.problem import Problem
from compress.kernels.recurrence.host import Part, run_parts
from compress.kernels.rms_norm.reference import rms_norm
from compress.kernels.select import Kernel, register
from compress.models.delta_net import gated_delta_rule, log_decays, of_length_one


def delta_net(
    qkv_gate_TF: Tensor,
    beta_decay_TH: Tensor,
    weights: DeltaWeights,
    states: RecurrentStates,
    sequences: Sequences,
    *,
    gate_TZ: Tensor | None = None,
) -> Tensor:
    """Return the gated outputs [T, Z], and write the slots of the sequences (`select.py`)."""
    delta = delta_of(states)
    gates_TZ = gates_of(delta, qkv_gate_TF, gate_TZ)
    x_TF = qkv_gate_TF[:, : delta.num_channels]
    out_TZ = qkv_gate_TF.new_empty(gates_TZ.shape)

    def run(part: Part, rows: slice) -> None:
        out_TZ[rows] = _gated(part, weights, x_TF[rows], gates_TZ[rows], beta_decay_TH[rows])

    run_parts(states, sequences, run)
    return out_TZ


def _gated(part: Part, weights: DeltaWeights, x_TF: Tensor, gate_TZ: Tensor, beta_decay_TH: Tensor) -> Tensor:
    """Return the gated outputs of a part [T, Z]."""
    delta = delta_of(part.states)
    mixed_TF = part.convolved(x_TF, weights.conv_FW)
    q_TF, k_TF, v_TF = mixed_TF.split([delta.key_size, delta.key_size, delta.value_size], dim=1)
    repeat = delta.num_heads // delta.num_key_heads
    q_THK, k_THK = (
        of_length_one(each.unflatten(1, (-1, delta.key_dim))).repeat_interleave(repeat, dim=1)
        for each in (q_TF, k_TF)
    )
    v_THV = v_TF.unflatten(1, (-1, delta.value_dim)).to(torch.float32)
    beta_TH, decay_TD = beta_decay_TH.split([delta.num_heads, delta.num_decays], dim=1)
    log_decay_THD = log_decays(delta, decay_TD, weights.dt_bias_D, weights.decay_rate_H)
    beta_TH = weights.beta_factor * torch.sigmoid(beta_TH)
    operands = q_THK * delta.key_dim**-0.5, k_THK, v_THV, log_decay_THD, beta_TH
    out_THV = (_step if part.length == 1 else _chunks)(part, *operands)
    normed_THV = rms_norm(out_THV.to(x_TF.dtype), weights.norm_V, weights.norm_eps)
    return (normed_THV.flatten(1) * gate_factor(delta, gate_TZ)).to(x_TF.dtype)


def _step(
    part: Part, q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, log_decay_THD: Tensor, beta_TH: Tensor
) -> Tensor:
    """Return the outputs of one row [1, H, V], and keep the state after it."""
    q_HK, k_HK, v_HV = (each[0] for each in (q_THK, k_THK, v_THV))
    before_HVK = part.before
    kept_H1D = log_decay_THD[0].exp().unsqueeze(1)
    both_HK2 = torch.stack((k_HK, q_HK), dim=-1)
    if not delta_of(part.states).by_channel:
        found_HV2 = torch.bmm(before_HVK, both_HK2) * kept_H1D
    else:
        found_HV2 = torch.bmm(before_HVK, both_HK2 * kept_H1D.mT)
    held_HV, out_HV = found_HV2.unbind(-1)
    update_HV = beta_TH.view(-1, 1) * (v_HV - held_HV)
    after_HVK = part.after
    torch.mul(before_HVK, kept_H1D, out=after_HVK)
    after_HVK.baddbmm_(update_HV.unsqueeze(-1), k_HK.unsqueeze(-2))
    return (out_HV + update_HV * (k_HK * q_HK).sum(-1, keepdim=True)).unsqueeze(0)


def _chunks(
    part: Part, q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, log_decay_THD: Tensor, beta_TH: Tensor
) -> Tensor:
    """Return the outputs of many rows [T, H, V], and keep the state after the last."""
    log_decay_TH = log_decay_THD if delta_of(part.states).by_channel else log_decay_THD.squeeze(-1)
    q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, before_BHKV = (
        each.unsqueeze(0) for each in (q_THK, k_THK, v_THV, log_decay_TH, beta_TH, part.before.mT)
    )
    out_BTHV, state_BHKV = gated_delta_rule(q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, before_BHKV)
    part.after.copy_(state_BHKV[0].mT)
    return out_BTHV[0]


def _supports(problem: Problem) -> str | None:
    return None if problem.device == "cpu" else "for a CPU"


register(Kernel("delta_net", "host", min_sm=0, priority=2, supports=_supports, fn=delta_net))
