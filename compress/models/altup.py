"""Alternating updates (AltUp, arXiv 2301.13310): the residual of a token is several streams, of which a layer
computes the first, and the others follow by linear maps that depend on the token.

    p_k  = s_k + sum_j P_kj s_j,           P = W_P r(s_0)    before a layer, which reads p_0 and returns y
    s'_k = p_k + (1 + c_k) (y - p_0),      c = W_c r(y)      after it
    r(x) = tanh(W_r norm(x) / D)

The first streams are the embedding x and W_k x |x| / |W_k x|; the norm before the head reads the mean of s_0
and W'_k s_k |s_0| / |W'_k s_k|. |x| is the root of the mean square, at least 10^-2.5 where it divides. All of
it but the products with W_r, W_k and W'_k is float32; p, s' and the mean are rounded to the dtype of streams,
where `transformers` rounds every step. The bound that `transformers` sets to P and c in training is not
applied. A stream other than the first is never that of a layer (`altup_active_idx`).

Shapes: n streams, D hidden, E = n D.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from compress.models.arch import Arch
from compress.models.linear import Linear

SMALLEST_MEAN_SQUARE = 1e-5
ALTUP_LINEARS = ("altup.router", "altup.predict", "altup.correct")
"""The linears of a layer; no scheme is theirs."""
Product = Callable[[int, Tensor], Tensor]
"""(k - 1, x [..., D]) -> W_k x, or W'_k x [..., D]."""


def mean_of_pairs(x: Tensor) -> Tensor:
    """Return the mean [..., 1] over the last dimension, added pair by pair, so that the bits of a row do not
    depend on the other rows on any device."""
    size = x.shape[-1]
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        paired = x[..., :half] + x[..., half : 2 * half]
        x = paired if x.shape[-1] % 2 == 0 else torch.cat((paired, x[..., 2 * half :]), dim=-1)
    return x / size


def matched(x: Tensor, magnitude_1: Tensor) -> Tensor:
    """Return x [..., D], float32, with the root mean square `magnitude_1` [..., 1]."""
    own = mean_of_pairs(x.square()).clamp(min=SMALLEST_MEAN_SQUARE).sqrt()
    return x * magnitude_1 / own


def first_streams(x: Tensor, num_streams: int, product: Product) -> Tensor:
    """Return the streams [..., n D] before the first layer from the embeddings [..., D]."""
    magnitude_1 = mean_of_pairs(x.to(torch.float32).square()).sqrt()
    others = [product(idx, x).to(torch.float32) for idx in range(num_streams - 1)]
    return torch.cat([x, *(matched(each, magnitude_1).to(x.dtype) for each in others)], dim=-1)


def joined_streams(streams_E: Tensor, num_streams: int, product: Product) -> Tensor:
    """Return what the norm before the head reads [..., D] of the streams [..., n D]."""
    first, *others = streams_E.unflatten(-1, (num_streams, -1)).unbind(-2)
    total = first.to(torch.float32)
    magnitude_1 = mean_of_pairs(total.square()).sqrt()
    for idx, each in enumerate(others):
        total = total + matched(product(idx, each.contiguous()).to(torch.float32), magnitude_1)
    return (total / num_streams).to(streams_E.dtype)


def small_product(x: Tensor, weight_OI: Tensor) -> Tensor:
    """Return x W^T [..., O] of few columns, in float32 and in their order."""
    weight_IO = weight_OI.to(torch.float32).t()
    total = x[..., :1] * weight_IO[0]
    for idx in range(1, x.shape[-1]):
        total = total + x[..., idx : idx + 1] * weight_IO[idx]
    return total


def predicted(streams_E: Tensor, routed_n: Tensor, weight_OI: Tensor) -> Tensor:
    """Return the streams [..., n D] that are predicted from r of the first, float32 [..., n], with W_P."""
    num_streams = routed_n.shape[-1]
    s_nD = streams_E.to(torch.float32).unflatten(-1, (num_streams, -1))
    p_nn = small_product(routed_n, weight_OI).unflatten(-1, (num_streams, num_streams))
    total = s_nD
    for idx in range(num_streams):
        total = total + p_nn[..., idx : idx + 1] * s_nD[..., idx : idx + 1, :]
    return total.flatten(-2).to(streams_E.dtype)


def corrected(predicted_E: Tensor, y_D: Tensor, routed_n: Tensor, weight_OI: Tensor) -> Tensor:
    """Return the streams [..., n D] after a layer with the output y, from r of it and W_c."""
    p_nD = predicted_E.to(torch.float32).unflatten(-1, (routed_n.shape[-1], -1))
    innovation_1D = y_D.to(torch.float32).unsqueeze(-2) - p_nD[..., :1, :]
    factors_n1 = (small_product(routed_n, weight_OI) + 1).unsqueeze(-1)
    return (p_nD + factors_n1 * innovation_1D).flatten(-2).to(predicted_E.dtype)


def with_others_plus(streams_E: Tensor, term_D: Tensor) -> Tensor:
    """Return the streams [..., n D] with a term [..., D] added to all but the first."""
    size = term_D.shape[-1]
    first, others = streams_E.split([size, streams_E.shape[-1] - size], dim=-1)
    others_mD = others.unflatten(-1, (-1, size)) + term_D.unsqueeze(-2)
    return torch.cat((first, others_mD.flatten(-2)), dim=-1)


class JoinedStreams(nn.ModuleList):
    """The linears W' of the streams but the first."""

    def __init__(self, arch: Arch) -> None:
        super().__init__(stream_linears(arch))

    def forward(self, streams_E: Tensor) -> Tensor:
        """Return what the norm before the head reads [..., D]."""
        return joined_streams(streams_E, len(self) + 1, lambda idx, x: self[idx](x))


def stream_names(arch: Arch) -> list[str]:
    """Return the names of the linears of the streams outside of the layers."""
    others = range(max(arch.altup_streams - 1, 0))
    return [f"{place}.streams.{idx}" for place in ("embed", "norm") for idx in others]


def stream_linears(arch: Arch) -> list[Linear]:
    """Return a linear [D, D] for each stream but the first."""
    return [Linear(arch.hidden_size, arch.hidden_size, bias=False) for _ in range(1, arch.altup_streams)]


def projected_streams(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return the streams [..., n D] before the first layer, by matrices [D, D] of one for each but the
    first."""
    return first_streams(x, len(weights) + 1, lambda idx, x: x @ weights[idx].to(x.dtype).t())
