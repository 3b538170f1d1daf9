"""A gated delta net between its linears on a CPU, in PyTorch's operators.

A few rows of a sequence, and its last ones that leave states of their own, go one after the other with
tensors of the same shapes, so that their bits depend on the sequence alone. The rows before them go in chunks
(`models/delta_net.py`).

Shapes: T rows, F channels of the convolution and after them Z = H V of the gate, H value heads, G key heads,
K key dimension, V value dimension, W positions of the convolution, N states and M inputs of a slot.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.recurrent_states import DeltaWeights, RecurrentStates, Sequences
from compress.kernels.problem import Problem
from compress.kernels.rms_norm.reference import rms_norm
from compress.kernels.select import Kernel, register
from compress.models.delta_net import gated_delta_rule, of_length_one

FEW_ROWS = 16
"""So many rows go one after the other."""


def delta_net(
    qkv_gate_TF: Tensor,
    beta_decay_TH: Tensor,
    weights: DeltaWeights,
    states: RecurrentStates,
    sequences: Sequences,
) -> Tensor:
    """Return the gated outputs [T, Z], and write the slots of the sequences (`select.py`)."""
    out_TZ = torch.empty_like(qkv_gate_TF[:, states.recurrence.num_channels :])
    start = 0
    lens = sequences.context_lens_R.tolist()
    slots = sequences.slots_R.tolist()
    for slot, context_len, length in zip(slots, lens, sequences.query_lens, strict=False):
        first = context_len - length
        wanted = 0
        if sequences.chunks_C4 is not None and states.saving is not None:
            wanted = int(states.saving.wanted_S2[slot, 0])
        for begin, end in _parts(length, states.num_kept, wanted - first):
            rows = slice(start + begin, start + end)
            part = _Part(states, weights, slot, first + begin, end - begin)
            out_TZ[rows] = part.run(qkv_gate_TF[rows], beta_decay_TH[rows])
            if 0 < wanted == first + end:
                states.save(slot, wanted)
        start += length
    return out_TZ


def _parts(length: int, num_kept: int, wanted: int) -> list[tuple[int, int]]:
    """Return the rows that go at once, of a sequence that has so many in a pass: one, or a long part, which
    ends where a state is wanted."""
    in_chunks = length - (num_kept - 1)
    if in_chunks <= FEW_ROWS:
        in_chunks = 0
    ends = sorted({end for end in (wanted, in_chunks) if 0 < end <= in_chunks})
    ends += range(in_chunks + 1, length + 1)
    return list(zip([0, *ends], ends, strict=False))


@dataclass(frozen=True)
class _Part:
    """Rows of one sequence, the first of which has position `first`."""

    states: RecurrentStates
    weights: DeltaWeights
    slot: int
    first: int
    length: int

    def run(self, qkv_gate_TF: Tensor, beta_decay_TH: Tensor) -> Tensor:
        """Return their gated outputs [T, Z]."""
        delta = self.states.recurrence
        x_TF, gate_TZ = qkv_gate_TF.split([delta.num_channels, delta.value_size], dim=1)
        mixed_TF = self._convolved(x_TF.to(torch.float32))
        q_TF, k_TF, v_TF = mixed_TF.split([delta.key_size, delta.key_size, delta.value_size], dim=1)
        repeat = delta.num_heads // delta.num_key_heads
        q_THK, k_THK = (
            of_length_one(each.unflatten(1, (-1, delta.key_dim))).repeat_interleave(repeat, dim=1)
            for each in (q_TF, k_TF)
        )
        v_THV = v_TF.unflatten(1, (-1, delta.value_dim)).to(torch.float32)
        beta_TH, decay_TH = beta_decay_TH.chunk(2, dim=1)
        log_decay_TH = self.weights.decay_rate_H * F.softplus(decay_TH + self.weights.dt_bias_H)
        operands = q_THK * delta.key_dim**-0.5, k_THK, v_THV, log_decay_TH, torch.sigmoid(beta_TH)
        out_THV = (self._step if self.length == 1 else self._chunks)(*operands)
        normed_THV = rms_norm(out_THV.to(gate_TZ.dtype), self.weights.norm_V, self.weights.norm_eps)
        return (normed_THV.flatten(1) * F.silu(gate_TZ.to(torch.float32))).to(gate_TZ.dtype)

    def _convolved(self, x_TF: Tensor) -> Tensor:
        """Return silu of the convolution, and keep the last inputs."""
        conv_FW = self.weights.conv_FW
        inputs_MF = self.states.inputs[self.slot]
        width = conv_FW.shape[1]
        positions = torch.arange(self.first - width + 1, self.first)
        past_WF = inputs_MF[positions % len(inputs_MF)]
        past_WF[positions < 0] = 0
        all_LF = torch.cat((past_WF, x_TF))
        total_TF = torch.zeros_like(x_TF)
        for tap in range(width):
            total_TF += all_LF[tap : tap + self.length] * conv_FW[:, tap].to(torch.float32)
        num_left = min(self.length, len(inputs_MF))
        end = self.first + self.length
        inputs_MF[torch.arange(end - num_left, end) % len(inputs_MF)] = x_TF[-num_left:]
        return F.silu(total_TF.to(conv_FW.dtype))

    def _state(self, num_tokens: int) -> Tensor:
        """Return the state after so many tokens [H, V, K]; rows that fill up a step come before the first."""
        heads_NHVK = self.states.heads[self.slot]
        if num_tokens <= 0:
            return torch.zeros_like(heads_NHVK[0])
        return heads_NHVK[(num_tokens - 1) % len(heads_NHVK)]

    def _step(
        self, q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, log_decay_TH: Tensor, beta_TH: Tensor
    ) -> Tensor:
        """Return the outputs of one row [1, H, V], and keep the state after it."""
        q_HK, k_HK, v_HV = (each[0] for each in (q_THK, k_THK, v_THV))
        before_HVK = self._state(self.first)
        kept_H11 = log_decay_TH.exp().view(-1, 1, 1)
        found_HV2 = torch.bmm(before_HVK, torch.stack((k_HK, q_HK), dim=-1)) * kept_H11
        held_HV, out_HV = found_HV2.unbind(-1)
        update_HV = beta_TH.view(-1, 1) * (v_HV - held_HV)
        after_HVK = self._state(self.first + 1)
        torch.mul(before_HVK, kept_H11, out=after_HVK)
        after_HVK.baddbmm_(update_HV.unsqueeze(-1), k_HK.unsqueeze(-2))
        return (out_HV + update_HV * (k_HK * q_HK).sum(-1, keepdim=True)).unsqueeze(0)

    def _chunks(
        self, q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, log_decay_TH: Tensor, beta_TH: Tensor
    ) -> Tensor:
        """Return the outputs of many rows [T, H, V], and keep the state after the last."""
        before_HKV = self._state(self.first).mT
        q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, before_BHKV = (
            each.unsqueeze(0) for each in (q_THK, k_THK, v_THV, log_decay_TH, beta_TH, before_HKV)
        )
        out_BTHV, state_BHKV = gated_delta_rule(q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, before_BHKV)
        self._state(self.first + self.length).copy_(state_BHKV[0].mT)
        return out_BTHV[0]


def _supports(problem: Problem) -> str | None:
    return None if problem.device == "cpu" else "for a CPU"


register(Kernel("delta_net", "host", min_sm=0, priority=2, supports=_supports, fn=delta_net))
