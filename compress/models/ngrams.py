"""Embeddings of n-grams (Qwen4: per-layer embeddings, PLE): a token and those before it are hashed to rows of
a table, and a layer adds what it computes of them to every stream of the residual before its first half.

    t_j    = the token j positions before, or the end-of-sequence token if one of the j tokens between is that
             one, or where the sequence has no such position
    id_nh  = (m_0 t_0 xor ... xor m_{n-1} t_{n-1}) mod p_nh + o_nh           n = 2, ..., N;  h = 1, ..., H
    e      = the rows id_nh of the table, side by side
    k_i    = norm_i(W_k e)_i,  a_i = norm_i(s_i),  v = W_v e                  s_i: stream i [D]
    g_i    = f(k_i . a_i / sqrt(D)),  f(x) = sign(x) sqrt(max(|x|, 1e-6))
    y_i    = sigmoid(g_i) v
    s'_i   = s_i + y_i + silu(conv(norm_i(y)_i))

m are odd numbers that a seed gives, p the primes from a base on, of which every table of a model has its own,
and o the sums of those before in the table. The convolution is causal, with its own weights for each channel,
over every N-th position. W_k, W_v and the table are in the dtype of the model, and no scheme is theirs; g is
float32, where `transformers` rounds every step.

Shapes: B batch, S sequence, n streams, D hidden, E = n D, H heads of an order, P embedding of all heads, W
positions of the convolution.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from compress.models.hyper_connection import MAX_STREAMS
from compress.models.limits import MAX_LAYERS, MAX_SIZE
from compress.models.recurrence import MAX_KERNEL
from compress.models.short_conv import ShortConv
from compress.untrusted.fields import Fields

NO_POSITION = -1
"""The token of a position before the first."""
MAX_TOKENS = 1 << 24
"""Ids below are exact in float32, in which states of sequences hold them."""
LEAST_GATE = 1e-6
MAX_ORDER = 16
MAX_HEADS = 256
"""Heads of the n-grams of one length: each has a prime, which is searched for."""
MAX_PARTS = 4096
MAX_ROWS = 1 << 31
_BITS_64 = (1 << 64) - 1
_LARGEST_INT64 = (1 << 63) - 1
_GAMMA = 0x9E3779B97F4A7C15
_OF_TABLE = 10007
"""The numbers of splitmix64 (Steele, Lea and Flood, 2014), and what the seed of a table grows by."""


@dataclass(frozen=True)
class NGrams:
    """The facts of the embeddings of n-grams of one layer.

    Args:
        order: N, the most tokens of an n-gram.
        num_heads: H, the heads of each order from 2 on.
        head_dim: the width of a row of the table.
        num_streams: n, the streams of the residual.
        kernel_size: the positions that the convolution reads, each `order` after the one before.
        base: the least number of rows of a head.
        index: how many layers before this one have such embeddings.
        seed: what the factors m follow from.
        eos: the end-of-sequence token.
        divisor: the rows of the table are a multiple of it.
        num_parts: the most tensors that a checkpoint stores the table in.
    """

    order: int
    num_heads: int
    head_dim: int
    num_streams: int
    kernel_size: int
    base: int
    index: int
    seed: int
    eos: int
    divisor: int
    num_parts: int

    @property
    def all_heads(self) -> int:
        """The heads of all orders."""
        return (self.order - 1) * self.num_heads

    @property
    def width(self) -> int:
        """P, the numbers of the rows of all heads."""
        return self.all_heads * self.head_dim

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """The rows p of each head in the table."""
        first = self.index * self.all_heads
        return primes_from(self.base, first + self.all_heads)[first:]

    @property
    def head_starts(self) -> tuple[int, ...]:
        """The first row o of each head in the table."""
        return (0, *accumulate(self.head_sizes[:-1]))

    @property
    def num_rows(self) -> int:
        """The rows of the table, those of no head included."""
        return -(-sum(self.head_sizes) // self.divisor) * self.divisor

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """The rows of each tensor that a checkpoint stores the table in."""
        most = -(-self.num_rows // self.num_parts)
        return tuple(min(most, self.num_rows - start) for start in range(0, self.num_rows, most))

    def factors(self, vocab_size: int) -> tuple[int, ...]:
        """Return the factors m of the tokens of an n-gram."""
        half = max(1, _LARGEST_INT64 // vocab_size // 2)
        seed = self.seed + _OF_TABLE * self.index
        return tuple(2 * (_mixed_bits(seed + _GAMMA * (idx + 1)) % half) + 1 for idx in range(self.order))

    @property
    def kept_positions(self) -> int:
        """The positions that the convolution spans, its own included."""
        return (self.kernel_size - 1) * self.order + 1

    def recurrences(self, hidden_size: int) -> tuple[ShortConv, ShortConv]:
        """Return what a sequence keeps: its last tokens, one channel for each token before that of an n-gram,
        and the last inputs of the convolution."""
        return (
            ShortConv.of(self.order - 1, self.order),
            ShortConv.of(self.num_streams * hidden_size, self.kept_positions),
        )

    def dense_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters."""
        size = self.num_streams * hidden_size
        norms = ("key_norm", "query_norm", "conv_norm")
        return {
            **{
                f"ngrams.table.{idx}.weight": (rows, self.head_dim)
                for idx, rows in enumerate(self.part_sizes)
            },
            "ngrams.key.weight": (size, self.width),
            "ngrams.value.weight": (hidden_size, self.width),
            **{f"ngrams.{name}.weight": (size,) for name in norms},
            "ngrams.conv.weight": (size, 1, self.kernel_size),
        }

    def why_unfit(self) -> str | None:
        """Return why the runtime does not compute them, None where it does."""
        if self.kept_positions <= MAX_KERNEL:
            return None
        return (
            f"a convolution of embeddings of n-grams over {self.kept_positions} positions; the runtime has "
            f"at most {MAX_KERNEL}."
        )

    def to_json(self) -> dict[str, Any]:
        """Return the facts as a manifest stores them."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(stored: Fields) -> "NGrams":
        """Read what `to_json` wrote; `Fields` raises its error for a value that is missing, of another type
        or out of range."""
        limits = {
            "order": (2, MAX_ORDER),
            "num_streams": (2, MAX_STREAMS),
            "base": (1, MAX_ROWS),
            "num_heads": (1, MAX_HEADS),
            "num_parts": (1, MAX_PARTS),
            "index": (0, MAX_LAYERS),
            "seed": (0, _LARGEST_INT64),
            "eos": (0, MAX_TOKENS),
        }
        names = [each.name for each in dataclasses.fields(NGrams)]
        return NGrams(**{name: stored.integer(name, *limits.get(name, (1, MAX_SIZE))) for name in names})


@lru_cache(maxsize=64)
def primes_from(base: int, count: int) -> tuple[int, ...]:
    """Return the first primes that are at least `base`."""
    found: list[int] = []
    number = base
    while len(found) < count:
        if _is_prime(number):
            found.append(number)
        number += 1
    return tuple(found)


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    return number % 2 == 1 and all(number % divisor for divisor in range(3, isqrt(number) + 1, 2))


def _mixed_bits(state: int) -> int:
    """Return the number of 64 bits that splitmix64 gives in a state."""
    bits = (state + _GAMMA) & _BITS_64
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _BITS_64
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _BITS_64
    return bits ^ (bits >> 31)


def heads_of(facts: NGrams, device: torch.device) -> Tensor:
    """Return the rows of each head, and its first row, int64 [2, orders, H]."""
    heads = torch.tensor([facts.head_sizes, facts.head_starts], device=device)
    return heads.unflatten(1, (-1, facts.num_heads))


def rows_of_ngrams(facts: NGrams, vocab_size: int, heads: Tensor, lags: Sequence[Tensor]) -> Tensor:
    """Return the rows [..., heads] of the table, int64, of tokens and the `order` - 1 tokens before each:
    int64 tensors [...], `NO_POSITION` before the first position. `heads` are `heads_of` the facts."""
    factors = facts.factors(vocab_size)
    sizes, starts = heads.unbind(0)
    mixed = lags[0] * factors[0]
    token = torch.zeros_like(lags[0])
    rows = []
    for idx, (before, factor) in enumerate(zip(lags[1:], factors[1:], strict=True)):
        ended = (before == NO_POSITION) | (token == facts.eos) if idx else before == NO_POSITION
        token = before.masked_fill(ended, facts.eos)
        mixed = mixed ^ (token * factor)
        rows.append(mixed.unsqueeze(-1) % sizes[idx] + starts[idx])
    return torch.cat(rows, dim=-1)


def lags_of(tokens_BS: Tensor, before_BW: Tensor) -> list[Tensor]:
    """Return tokens [B, S], and those that come 1, 2, ..., W positions before each, given the W tokens before
    the first."""
    width = before_BW.shape[1]
    all_tokens = torch.cat((before_BW, tokens_BS), dim=1).to(torch.int64)
    length = tokens_BS.shape[1]
    return [all_tokens[:, width - lag : width - lag + length] for lag in range(width + 1)]


def softened(x: Tensor) -> Tensor:
    """Return f(x) of products of keys and streams."""
    return x.abs().clamp_min(LEAST_GATE).sqrt() * x.sign()
