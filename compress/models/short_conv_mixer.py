"""The module of a gated short convolution (`short_conv.py`), which takes the place of attention in a layer.

Shapes: B batch, S sequence, D hidden, F channels.
"""

from torch import Tensor, nn

from compress.models.arch import Arch
from compress.models.layer_shape import LayerShape
from compress.models.recurrence import RecurrentState, convolution, last_inputs
from compress.models.recurrent_mixer import RecurrentMixer, convolution_of
from compress.models.short_conv import ShortConv


class ShortConvMixer(RecurrentMixer):
    """A short convolution with its linears."""

    B: nn.Linear
    C: nn.Linear
    x: nn.Linear

    def __init__(self, arch: Arch, shape: LayerShape, widths: ShortConv) -> None:
        super().__init__(arch, shape)
        self.widths = widths
        self.conv = convolution_of(widths)

    def recur(self, x_BSD: Tensor, past: RecurrentState | None) -> tuple[Tensor, RecurrentState]:
        """Return the outputs of all channels, and the last products of B and x."""
        past_BWF = None if past is None else past.inputs_BWF
        products_BSF = self.B(x_BSD) * self.x(x_BSD)
        mixed_BSF = convolution(products_BSF, self.conv.weight.squeeze(1), past_BWF)
        kept_BWF = last_inputs(products_BSF, past_BWF, self.widths.kernel_size)
        return self.C(x_BSD) * mixed_BSF, RecurrentState(kept_BWF, None)
