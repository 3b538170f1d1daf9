"""Hyper-connections (arXiv 2409.19606): the residual of a token is several streams, of which a half-layer
reads a mixture, and to each of which it adds its output.

    z = W s r,  r = (mean(s^2) + e)^-1/2          s: the n streams one after the other [n D]
    p = sigmoid(g_1 z_p + b_p) + eps              x = sum_i p_i s_i, the input of the half-layer (its norm)
    q = m sigmoid(g_2 z_q + b_q) + post_eps       s'_k = q_k y + sum_j C_jk s_j, y its output
    C = sinkhorn(softmax(g_3 z_C + b_C) + eps)    or the identity, without a product of its own

In the manifold-constrained form (mHC, arXiv 2512.24880) the columns and the rows of C are divided by their
sums in turns (plus eps), columns first and last, which brings C close to a matrix whose rows and columns sum
to 1. The first streams are n copies of the embedding; at the end the head reads sum_i p_i s_i, by parameters
of its own, or the mean of the streams. All of it is float32; x and s' are rounded to the dtype of streams.
`transformers` rounds q and C of some families to 16 bits before, and s' twice.

Shapes: n streams, D hidden, E = n D, M logits: n for the head, else 2 n, or 2 n + n^2 with a C of its own.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.untrusted.fields import Fields

MAX_STREAMS = 16
MAX_ITERATIONS = 100
MAX_FACTOR = 1e3
FIRST_GAIN = 0.01
"""The gains of a model that is not trained, as `transformers` initializes them."""
HYPER_PARAMETERS = ("hyper.weight", "hyper.bias", "hyper.gains")
"""How the names of the parameters end, which are float32 in a model of any dtype."""


class Streams(Protocol):
    """The facts of a residual of several streams."""

    @property
    def num_streams(self) -> int:
        """The number of streams."""

    @property
    def copies(self) -> bool:
        """Whether all streams begin as the embedding, and not the first alone."""


@dataclass(frozen=True)
class HyperConnections:
    """The facts of the hyper-connections of a model.

    Args:
        num_streams: n, at least 2.
        eps: is added to the factors p, to the numbers of C before they are divided, and to the sums by which
            they are.
        sinkhorn_iterations: how often columns and rows of C are divided, the first time columns alone; 0
            where streams are not mixed.
        post_factor: m.
        post_eps: is added to the factors q.
        mean_head: the head reads the mean of the streams, without parameters.
    """

    num_streams: int
    eps: float
    sinkhorn_iterations: int = 0
    post_factor: float = 2.0
    post_eps: float = 0.0
    mean_head: bool = False

    @property
    def copies(self) -> bool:
        """Whether all streams begin as the embedding."""
        return True

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of logits that have one gain: of p, of q and, where streams are mixed, of C."""
        n = self.num_streams
        return (n, n, n * n) if self.sinkhorn_iterations else (n, n)

    def shapes(self, hidden_size: int, *, of_head: bool = False) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters of a half-layer, or of the head, by their leaves."""
        sizes = self.sizes[:1] if of_head else self.sizes
        if of_head and self.mean_head:
            return {}
        num_logits = sum(sizes)
        return {
            "weight": (num_logits, self.num_streams * hidden_size),
            "bias": (num_logits,),
            "gains": (len(sizes),),
        }

    def num_params(self, hidden_size: int, num_halves: int) -> int:
        """Return the parameters of so many half-layers and of the head."""
        of_half, of_head = (
            sum(map(math.prod, self.shapes(hidden_size, of_head=each).values())) for each in (False, True)
        )
        return num_halves * of_half + of_head

    def to_json(self) -> dict[str, Any]:
        """Return the facts as a manifest stores them."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(stored: Fields) -> "HyperConnections":
        """Read what `to_json` wrote; `Fields` raises its error for a value that is missing, of another type
        or out of range."""
        return HyperConnections(
            num_streams=stored.integer("num_streams", 2, MAX_STREAMS),
            eps=stored.number("eps", 0, 1),
            sinkhorn_iterations=stored.integer("sinkhorn_iterations", 0, MAX_ITERATIONS),
            post_factor=stored.number("post_factor", 0, MAX_FACTOR),
            post_eps=stored.number("post_eps", 0, 1),
            mean_head=stored.flag("mean_head"),
        )


@dataclass(frozen=True)
class Coefficients:
    """The factors of the streams of each row, float32: p [..., n] and, for a half-layer, q [..., n] and C
    [..., n, n], whose rows are the streams before; None where streams are not mixed."""

    pre: Tensor
    post: Tensor | None = None
    mixing: Tensor | None = None


Elementwise = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
"""(fn, x [T, M]) -> fn(x): how a function of single numbers is computed."""


def as_torch_does(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return fn(x)."""
    return fn(x)


def coefficients(
    facts: HyperConnections,
    logits_TM: Tensor,
    bias_M: Tensor,
    gains: Tensor,
    computed: Elementwise = as_torch_does,
) -> Coefficients:
    """Return the factors of the streams from the products z [..., M] with W, all float32; those of the head
    where there are n of them. Sums are written out, so that their order is that of the streams."""
    n = facts.num_streams
    sizes = facts.sizes[: len(gains)]
    parts = zip(logits_TM.split(sizes, -1), bias_M.split(sizes), gains.unbind(), strict=True)
    pre, *others = [each * gain + bias for each, bias, gain in parts]
    pre = computed(torch.sigmoid, pre) + facts.eps
    if not others:
        return Coefficients(pre)
    post = facts.post_factor * computed(torch.sigmoid, others[0]) + facts.post_eps
    if len(others) == 1:
        return Coefficients(pre, post)
    logits_nn = others[1].unflatten(-1, (n, n))
    below_0 = logits_nn - logits_nn.amax(-1, keepdim=True)
    exponentials_nn = computed(torch.exp, below_0.flatten(-2)).unflatten(-1, (n, n))
    mixing_nn = exponentials_nn / _sum(exponentials_nn, -1) + facts.eps
    for idx in range(facts.sinkhorn_iterations):
        if idx:
            mixing_nn = mixing_nn / (_sum(mixing_nn, -1) + facts.eps)
        mixing_nn = mixing_nn / (_sum(mixing_nn, -2) + facts.eps)
    return Coefficients(pre, post, mixing_nn)


def _sum(x_nn: Tensor, dim: int) -> Tensor:
    """Return the sums [..., n, 1] of rows, or [..., 1, n] of columns, added one after the other."""
    total, *others = x_nn.split(1, dim)
    for each in others:
        total = total + each
    return total


def repeated(facts: Streams | None, x: Tensor) -> Tensor:
    """Return the streams [..., n D] before the first layer from the embeddings [..., D]; these themselves in
    a model whose residual is one stream. Streams that are no copies are zeros."""
    if facts is None:
        return x
    if not facts.copies:
        return F.pad(x, (0, (facts.num_streams - 1) * x.shape[-1]))
    return x.repeat(*(1,) * (x.dim() - 1), facts.num_streams)


def mixed(streams_TE: Tensor, pre_Tn: Tensor) -> Tensor:
    """Return the sum of the streams [..., D], each times its factor, in their dtype."""
    streams = streams_TE.unflatten(-1, (pre_Tn.shape[-1], -1)).unbind(-2)
    total = streams[0].to(torch.float32) * pre_Tn[..., :1]
    for idx, stream in enumerate(streams[1:], start=1):
        total = total + stream.to(torch.float32) * pre_Tn[..., idx : idx + 1]
    return total.to(streams_TE.dtype)


def spread(y_TD: Tensor, streams_TE: Tensor, factors: Coefficients) -> Tensor:
    """Return the streams [..., n D] after a half-layer with the output y [..., D]."""
    assert factors.post is not None
    before = [each.to(torch.float32) for each in streams_TE.unflatten(-1, (-1, y_TD.shape[-1])).unbind(-2)]
    y_f32 = y_TD.to(torch.float32)
    after = []
    for k, stream in enumerate(before):
        kept = stream
        if factors.mixing is not None:
            kept = before[0] * factors.mixing[..., 0, k : k + 1]
            for j, each in enumerate(before[1:], start=1):
                kept = kept + each * factors.mixing[..., j, k : k + 1]
        after.append((factors.post[..., k : k + 1] * y_f32 + kept).to(streams_TE.dtype))
    return torch.cat(after, dim=-1)


class HyperConnection(nn.Module):
    """The hyper-connection of a half-layer, or that of the head; `norm_eps` is e."""

    def __init__(
        self, facts: HyperConnections, hidden_size: int, norm_eps: float, *, of_head: bool = False
    ) -> None:
        super().__init__()
        self.facts = facts
        self.norm_eps = norm_eps
        shapes = facts.shapes(hidden_size, of_head=of_head)
        self.weight = nn.Parameter(torch.zeros(shapes["weight"]))
        self.bias = nn.Parameter(torch.zeros(shapes["bias"]))
        self.gains = nn.Parameter(torch.full(shapes["gains"], FIRST_GAIN))

    def factors(self, streams_TE: Tensor) -> Coefficients:
        """Return the factors of the streams [..., n D]."""
        x_f32 = streams_TE.to(torch.float32)
        weight, bias, gains = (each.to(torch.float32) for each in (self.weight, self.bias, self.gains))
        with torch.autocast(streams_TE.device.type, enabled=False):
            product = F.linear(x_f32, weight)
        inverse_T1 = torch.rsqrt(x_f32.square().mean(-1, keepdim=True) + self.norm_eps)
        return coefficients(self.facts, product * inverse_T1, bias, gains)

    def forward(self, streams_TE: Tensor) -> Tensor:
        """Return the mixture of the streams [..., D]."""
        return mixed(streams_TE, self.factors(streams_TE).pre)

    def enter(self, streams_TE: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the mixture of the streams [..., D], which a half-layer reads, and the function that returns
        the streams after it from its output."""
        factors = self.factors(streams_TE)

        def leave(y_TD: Tensor) -> Tensor:
            return spread(y_TD, streams_TE, factors)

        return mixed(streams_TE, factors.pre), leave


class MeanOfStreams(nn.Module):
    """The head's hyper-connection where it reads the mean of the streams."""

    def __init__(self, num_streams: int) -> None:
        super().__init__()
        self.num_streams = num_streams

    def forward(self, streams_TE: Tensor) -> Tensor:
        """Return the mean of the streams [..., D]."""
        return mean_of(streams_TE, self.num_streams)


def mean_of(streams_TE: Tensor, num_streams: int) -> Tensor:
    """Return the mean [..., D] of the streams, in their dtype; each row on its own."""
    first, *others = streams_TE.to(torch.float32).unflatten(-1, (num_streams, -1)).unbind(-2)
    for each in others:
        first = first + each
    return (first / num_streams).to(streams_TE.dtype)
