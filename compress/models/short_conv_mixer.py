"""The module of a gated short convolution (`short_conv.py`), which takes the place of attention in a layer.

Shapes: B batch, S sequence, D hidden, F channels.
"""

from torch import Tensor, nn

from compress.models.arch import Arch
from compress.models.attention import AttentionFn, CachedAttention
from compress.models.layer_shape import LayerShape
from compress.models.linear import linear_of
from compress.models.recurrence import RecurrentState, convolution, last_inputs
from compress.models.short_conv import ShortConv
from compress.models.tap import Tap, no_tap
from compress.models.token_mixer import TokenMixer


class ShortConvMixer(TokenMixer):
    """A short convolution with its linears."""

    B: nn.Linear
    C: nn.Linear
    x: nn.Linear

    def __init__(self, arch: Arch, shape: LayerShape, widths: ShortConv) -> None:
        super().__init__()
        self.widths = widths
        for group in shape.attention_groups:
            for linear in group.linears:
                self.add_module(linear.removeprefix("conv."), linear_of(arch, shape, linear))
        channels = widths.num_channels
        self.conv = nn.Conv1d(channels, channels, widths.kernel_size, groups=channels, bias=False)

    def heads(
        self,
        x_BSD: Tensor,
        positions: Tensor,
        attention: AttentionFn,
        tap: Tap = no_tap,
        *,
        layer_idx: int,
    ) -> Tensor:
        """Return the outputs of all channels: the input of `o`. The last products of a cached decode are in
        its `attention`."""
        del positions, tap
        states = attention.states if isinstance(attention, CachedAttention) else {}
        past = states.get(layer_idx)
        past_BWF = None if past is None else past.inputs_BWF
        products_BSF = self.B(x_BSD) * self.x(x_BSD)
        mixed_BSF = convolution(products_BSF, self.conv.weight.squeeze(1), past_BWF)
        kept_BWF = last_inputs(products_BSF, past_BWF, self.widths.kernel_size)
        states[layer_idx] = RecurrentState(kept_BWF, None)
        return self.C(x_BSD) * mixed_BSF
