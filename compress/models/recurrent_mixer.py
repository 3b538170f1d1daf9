"""The module of a recurrence (`recurrence.py`), which takes the place of attention in a layer, or joins it.

Shapes: B batch, S sequence, D hidden, F outputs of all heads.
"""

from abc import abstractmethod

from torch import Tensor, nn

from compress.models.arch import Arch
from compress.models.attention import AttentionFn, CachedAttention
from compress.models.layer_shape import LayerShape
from compress.models.linear import linear_of
from compress.models.recurrence import Recurrence, RecurrentState
from compress.models.tap import Tap, no_tap
from compress.models.token_mixer import TokenMixer


class RecurrentMixer(TokenMixer):
    """A recurrence with its linears."""

    def __init__(self, arch: Arch, shape: LayerShape) -> None:
        super().__init__()
        for group in shape.attention_groups:
            for linear in group.linears:
                if not linear.startswith("attn."):
                    self.add_module(linear.partition(".")[2], linear_of(arch, shape, linear))

    def heads(
        self,
        x_BSD: Tensor,
        positions: Tensor,
        attention: AttentionFn,
        tap: Tap = no_tap,
        *,
        layer_idx: int,
    ) -> Tensor:
        """Return the outputs of all heads: the input of `o`. What a cached decode goes on from is in its
        `attention`."""
        del positions, tap
        states = attention.states if isinstance(attention, CachedAttention) else {}
        out_BSF, states[layer_idx] = self.recur(x_BSD, states.get(layer_idx))
        return out_BSF

    @abstractmethod
    def recur(self, x_BSD: Tensor, past: RecurrentState | None) -> tuple[Tensor, RecurrentState]:
        """Return the input of `o` [B, S, F], and the state after the last position."""


def convolution_of(recurrence: Recurrence, channels: int | None = None, *, bias: bool = False) -> nn.Conv1d:
    """Return the convolution of a recurrence, or of so many of its channels, with its own weights for
    each."""
    channels = recurrence.num_channels if channels is None else channels
    return nn.Conv1d(channels, channels, recurrence.kernel_size, groups=channels, bias=bias)
