"""The parts that attention and recurrences share: heads that mix positions, and the linear of their
outputs.

Shapes: B batch, S sequence, D hidden, F outputs of all heads.
"""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from compress.models.attention import AttentionFn
from compress.models.tap import Tap, no_tap


class TokenMixer(nn.Module, ABC):
    """The inner part of the first half of a layer."""

    o: nn.Linear

    def forward(
        self, x_BSD: Tensor, positions: Tensor, attention: AttentionFn, layer_idx: int, tap: Tap
    ) -> Tensor:
        tap("attn_in", x_BSD)
        out_BSF = self.heads(x_BSD, positions, attention, tap, layer_idx=layer_idx)
        tap("attn_out", out_BSF)
        return self.o(out_BSF)

    @abstractmethod
    def heads(
        self,
        x_BSD: Tensor,
        positions: Tensor,
        attention: AttentionFn,
        tap: Tap = no_tap,
        *,
        layer_idx: int,
    ) -> Tensor:
        """Return the concatenated outputs of all heads, gated if they are: the input of `o`."""
