"""Reference of the correction of streams after a layer with alternating updates (`models/altup.py`)."""

from torch import Tensor

from compress.kernels.operands.altup import AltUpWeights, routed
from compress.kernels.select import Kernel, anything, register
from compress.models.altup import corrected


def altup_correct(y_TD: Tensor, predicted_TE: Tensor, altup: AltUpWeights) -> tuple[Tensor, Tensor]:
    """Return the streams [T, n D] after a layer with the output y, and the first of them by its scale
    [T, D], which the layer reads for the embeddings of tokens."""
    streams_TE = corrected(predicted_TE, y_TD, routed(y_TD, altup), altup.correct_OI)
    return streams_TE, streams_TE[:, : y_TD.shape[1]] * altup.scale_D


register(Kernel("altup_correct", "reference", min_sm=0, priority=0, supports=anything, fn=altup_correct))
