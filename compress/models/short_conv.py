"""The facts of a gated short convolution (LFM2, arXiv 2511.23404): each channel of two products of linears is
the sum of its last few positions.

    B, C, x = linears of the input
    y_t = C_t * (w_0 (B x)_{t-W+1} + ... + w_{W-1} (B x)_t)

It is a recurrence whose heads have no state: what a sequence leaves for its next position are the last
products of B and x.

Shapes: W positions of the convolution.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from compress.models.recurrence import Recurrence


@dataclass(frozen=True)
class ShortConv(Recurrence):
    """The widths of one short convolution: one head of as many values as there are channels, and keys of no
    numbers."""

    module: ClassVar[str] = "conv"
    least_key_dim: ClassVar[int] = 0

    @property
    def first_linears(self) -> tuple[str, ...]:
        """The linears that read the stream."""
        return ("conv.B", "conv.C", "conv.x")

    @staticmethod
    def of(channels: int, kernel_size: int) -> "ShortConv":
        """Return the widths for so many channels and positions."""
        return ShortConv(1, 1, 0, channels, kernel_size)

    def linear_shapes(self, hidden_size: int) -> Mapping[str, tuple[int, int]]:
        """Return [O, I] of the linears that schemes quantize."""
        return {
            **dict.fromkeys(self.first_linears, (self.num_channels, hidden_size)),
            "conv.o": (hidden_size, self.num_channels),
        }

    def dense_shapes(self, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the other parameters."""
        return {"conv.conv.weight": (self.num_channels, 1, self.kernel_size)}
