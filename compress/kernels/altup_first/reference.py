"""Reference of the streams before the first layer with alternating updates (`models/altup.py`)."""

from collections.abc import Sequence

from torch import Tensor

from compress.kernels.select import Kernel, anything, register
from compress.models.altup import first_streams


def altup_first(x_TD: Tensor, products: Sequence[Tensor]) -> Tensor:
    """Return the streams [T, n D] from the embeddings x, and from their products with the matrix of each
    stream but the first, float32 [T, D]."""
    return first_streams(x_TD, len(products) + 1, lambda idx, _: products[idx])


register(Kernel("altup_first", "reference", min_sm=0, priority=0, supports=anything, fn=altup_first))
