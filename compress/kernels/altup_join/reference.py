"""Reference of the row that the norm before the head reads of the streams of alternating updates
(`models/altup.py`)."""

from collections.abc import Sequence

from torch import Tensor

from compress.kernels.select import Kernel, anything, register
from compress.models.altup import joined_streams


def altup_join(streams_TE: Tensor, products: Sequence[Tensor]) -> Tensor:
    """Return the mean [T, D] of the first of the streams [T, n D] and of the products of each other one with
    its matrix, float32 [T, D], brought to the magnitude of the first."""
    return joined_streams(streams_TE, len(products) + 1, lambda idx, _: products[idx])


register(Kernel("altup_join", "reference", min_sm=0, priority=0, supports=anything, fn=altup_join))
