"""Reference of the end of a half-layer with hyper-connections: its output is added to every stream."""

from torch import Tensor

from compress.kernels.operands.hyper import unpacked_factors
from compress.kernels.select import Kernel, anything, register
from compress.models.hyper_connection import spread


def hyper_spread(y_TD: Tensor, streams_TE: Tensor, factors_TF: Tensor) -> Tensor:
    """Return the streams [T, n D] after a half-layer with the output y, by the factors that `hyper_mix` left
    for it."""
    num_streams = streams_TE.shape[1] // y_TD.shape[1]
    return spread(y_TD, streams_TE, unpacked_factors(factors_TF, num_streams))


register(Kernel("hyper_spread", "reference", min_sm=0, priority=0, supports=anything, fn=hyper_spread))
