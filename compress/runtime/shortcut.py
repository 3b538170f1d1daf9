"""Shortcut-connected mixtures in serving (`models/shortcut.py`): the two streams are added by operations of
torch, whose bits of a row do not depend on the other rows. The experts run where they are read, and not next
to the layer after theirs.

Shapes: T rows, D hidden, E = 2 D.
"""

from dataclasses import dataclass

from torch import Tensor

from compress.models.shortcut import Sum, added, first_stream
from compress.models.weights import Weights

_MIXTURE = "moe.router.weight"


@dataclass(frozen=True)
class ShortcutSum:
    """The sum of a half-layer with the two streams; that of the head is never added to."""

    kind: Sum

    def __call__(self, streams_TE: Tensor) -> Tensor:
        """Return what the half-layer, or the head, reads [T, D]."""
        return first_stream(streams_TE)

    def added(self, y_T: Tensor, streams_TE: Tensor) -> Tensor:
        """Return the streams after a half-layer from its output."""
        return added(self.kind, streams_TE, y_T)

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step reads: there are no weights."""
        return 0


def shortcut_sum(weights: Weights, name: str) -> ShortcutSum:
    """Return the sum of a half-layer by its canonical name, `attn_hyper` or `ffn_hyper`, of a layer with
    these weights, or that of the head."""
    if name != "ffn_hyper":
        return ShortcutSum("mixer")
    return ShortcutSum("experts" if _MIXTURE in weights else "ffn")
