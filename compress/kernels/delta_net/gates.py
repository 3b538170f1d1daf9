"""The gates of a delta net in PyTorch's operators. Kernels on a CPU compute them so; those on a GPU share
`delta_of` and `gates_of`.

Shapes: T rows, F channels of the convolution, Z outputs of all heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.recurrent_states import RecurrentStates
from compress.models.delta_net import DeltaNet


def delta_of(states: RecurrentStates) -> DeltaNet:
    """Return the widths of the delta net whose states these are."""
    assert isinstance(states.recurrence, DeltaNet)
    return states.recurrence


def gates_of(delta: DeltaNet, qkv_gate_TF: Tensor, gate_TZ: Tensor | None) -> Tensor:
    """Return the outputs of the linear of gates [T, Z]: those that follow queries, keys and values, or those
    that are apart."""
    return qkv_gate_TF[:, delta.num_channels :] if gate_TZ is None else gate_TZ


def gate_factor(delta: DeltaNet, gate: Tensor) -> Tensor:
    """Return what the outputs of heads are multiplied by, float32, of the outputs of the linear of gates."""
    gate = gate.to(torch.float32)
    return torch.sigmoid(gate) if delta.by_channel else F.silu(gate)
