"""A workload: the requests of one run with their tokens and their arrivals, all decided by a seed.

Tokens are drawn as the documented rule of a workload file draws them: a fresh numpy generator of the seed,
and for each request in order `integers(10, vocab_size - 10, size=prompt_tokens)`, the upper end exclusive.
Repeats after the first draw from another stream, so that a prefix cache cannot hold their prompts; lengths
and arrivals are the same in all repeats.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from compress.digest import digest_bytes
from compress.errors import UsageError
from compress.validate.load.arrivals import Mode, Traffic, realized_rate
from compress.validate.load.lengths import LengthLaw, Lengths, draw_lengths
from compress.validate.load.trace import Trace

OUTER_TOKENS = 10
"""Ids that are left out at both ends of the vocabulary, where many models have special tokens."""


@dataclass(frozen=True)
class LoadRequest:
    """Prompt token ids, and how many tokens are generated, end-of-sequence tokens passed over."""

    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival. `arrivals_s` are seconds after the start; None: each request is
    sent as soon as fewer than `max_concurrency` are unfinished.
    """

    name: str
    requests: tuple[LoadRequest, ...]
    arrivals_s: tuple[float, ...] | None
    traffic: Traffic
    mode: Mode

    @property
    def max_concurrency(self) -> int | None:
        """The most unfinished requests at once; None: no limit."""
        return self.traffic.max_concurrency

    @property
    def request_rate(self) -> float:
        """The requests a second that were asked for, of a trace those of its schedule."""
        if self.mode == "trace" and self.arrivals_s is not None:
            return realized_rate(self.arrivals_s)
        return self.traffic.request_rate

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(each.prompt) + each.output_tokens for each in self.requests)

    def under(self, traffic: Traffic, *, seed: int) -> "Workload":
        """Return the same requests under another arrival process."""
        arrivals_s = traffic.arrivals_s(len(self.requests), seed=seed)
        return replace(self, arrivals_s=arrivals_s, traffic=traffic, mode=traffic.mode)

    def cut(self, num: int) -> "Workload":
        """Return the first `num` requests with their arrivals."""
        arrivals_s = None if self.arrivals_s is None else self.arrivals_s[:num]
        return replace(self, requests=self.requests[:num], arrivals_s=arrivals_s)

    def first(self, num: int) -> "Workload":
        """Return the first `num` requests, sent without a schedule: a warm-up."""
        return replace(self, requests=self.requests[:num], arrivals_s=None)

    @property
    def digest(self) -> str:
        """The digest of all prompt tokens: little-endian 32-bit integers, request by request."""
        return token_digest(self.requests)


def token_digest(requests: Sequence[LoadRequest]) -> str:
    """Return the SHA-256 digest of all prompt tokens as little-endian 32-bit integers."""
    return digest_bytes(b"".join(np.asarray(each.prompt, dtype="<i4").tobytes() for each in requests))


def draw_requests(
    lengths: Lengths, *, vocab_size: int, seed: int, repeat: int = 0, prefix_tokens: int = 0
) -> tuple[LoadRequest, ...]:
    """Return requests of these lengths with random tokens; all prompts of a repeat begin with the same
    `prefix_tokens`, as far as they are that long.

    Raises:
        UsageError: the vocabulary is too small to draw from.
    """
    if vocab_size <= 2 * OUTER_TOKENS:
        raise UsageError(
            f"random prompts need a vocabulary of more than {2 * OUTER_TOKENS} tokens, and this one has "
            f"{vocab_size}."
        )
    rng = np.random.default_rng(seed if repeat == 0 else [seed, 2, repeat])
    high = vocab_size - OUTER_TOKENS
    prefix = [] if prefix_tokens == 0 else rng.integers(OUTER_TOKENS, high, size=prefix_tokens).tolist()
    requests = []
    for num_prompt, num_output in zip(lengths.prompt_tokens, lengths.output_tokens, strict=True):
        own = rng.integers(OUTER_TOKENS, high, size=num_prompt).tolist()
        shared = min(prefix_tokens, num_prompt - 1)  # the last token is its own
        requests.append(LoadRequest(tuple(prefix[:shared] + own[shared:]), num_output))
    return tuple(requests)


@dataclass(frozen=True)
class RandomWorkload:
    """The laws of a workload: lengths, tokens and arrivals."""

    num_requests: int
    prompt: LengthLaw
    output: LengthLaw
    vocab_size: int
    traffic: Traffic
    seed: int = 0
    prefix_tokens: int = 0
    name: str = "random"

    @property
    def lengths(self) -> Lengths:
        """The lengths of all requests."""
        return draw_lengths(self.num_requests, prompt=self.prompt, output=self.output, seed=self.seed)

    def draw(self, repeat: int = 0) -> Workload:
        """Return the workload of one repeat.

        Raises:
            UsageError: the vocabulary is too small to draw from.
        """
        requests = draw_requests(
            self.lengths,
            vocab_size=self.vocab_size,
            seed=self.seed,
            repeat=repeat,
            prefix_tokens=self.prefix_tokens,
        )
        arrivals_s = self.traffic.arrivals_s(self.num_requests, seed=self.seed)
        return Workload(self.name, requests, arrivals_s, self.traffic, self.traffic.mode)


def replay(
    trace: Trace, *, vocab_size: int, seed: int, repeat: int = 0, max_concurrency: int | None = None
) -> Workload:
    """Return the workload of a trace: its arrivals and lengths, and random tokens."""
    requests = draw_requests(trace.lengths, vocab_size=vocab_size, seed=seed, repeat=repeat)
    traffic = Traffic(max_concurrency=max_concurrency)
    return Workload(trace.name, requests, trace.arrivals_s, traffic, "trace")
