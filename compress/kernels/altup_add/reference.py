"""Reference of the end of a layer with alternating updates (`models/altup.py`) and embeddings of tokens for
each layer: the norm of a row is added to all streams but the first."""

from torch import Tensor

from compress.kernels.operands.rows import RowNorm
from compress.kernels.rms_norm.reference import rms_norm
from compress.kernels.select import Kernel, anything, register


def altup_add_(y_TD: Tensor, streams_TE: Tensor, norm: RowNorm) -> Tensor:
    """Add the norm of y to all streams [T, n D] but the first, in place, and return them."""
    others_TmD = streams_TE.unflatten(-1, (-1, y_TD.shape[1]))[:, 1:]
    others_TmD += rms_norm(y_TD, norm.weight, norm.eps).unsqueeze(1)
    return streams_TE


register(Kernel("altup_add", "reference", min_sm=0, priority=0, supports=anything, fn=altup_add_))
