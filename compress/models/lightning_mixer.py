"""The module of lightning attention (`lightning.py`), which takes the place of attention in a layer.

Shapes: B batch, S sequence, D hidden, H heads, K dimension of a head, F outputs of linears.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.models.arch import Arch
from compress.models.layer_shape import LayerShape
from compress.models.lightning import LIGHTNING_NORM, Lightning
from compress.models.mamba2 import state_space_scan
from compress.models.norms import Norm
from compress.models.recurrence import RecurrentState
from compress.models.recurrent_mixer import RecurrentMixer


class LightningAttention(RecurrentMixer):
    """Linear attention with constant decays, and its linears."""

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    gate: nn.Linear

    def __init__(self, arch: Arch, shape: LayerShape, lightning: Lightning) -> None:
        super().__init__(arch, shape)
        self.lightning = lightning
        self.norm = Norm(lightning.value_size, arch.eps_of(LIGHTNING_NORM))

    def recur(self, x_BSD: Tensor, past: RecurrentState | None) -> tuple[Tensor, RecurrentState]:
        """Return the outputs of all heads, normed and gated."""
        q_BSHK, k_BSHK, v_BSHK = (
            F.silu(linear(x_BSD)).unflatten(-1, (-1, self.lightning.key_dim))
            for linear in (self.q, self.k, self.v)
        )
        slopes_H = torch.tensor(self.lightning.slopes, dtype=torch.float32, device=x_BSD.device)
        out_BSHK, state = state_space_scan(
            q_BSHK,
            k_BSHK,
            v_BSHK,
            -slopes_H.expand(q_BSHK.shape[:-1]),
            None if past is None else past.heads_BHKV,
        )
        normed_BSF = self.norm(out_BSHK.flatten(-2).to(x_BSD.dtype))
        gated_BSF = torch.sigmoid(self.gate(x_BSD)) * normed_BSF
        return gated_BSF, RecurrentState(x_BSD.new_empty(x_BSD.shape[0], 0, 0), state)
