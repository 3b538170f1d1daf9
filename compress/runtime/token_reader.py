"""Reads the tokens of a pass into its requests, once the device has chosen them."""

import time
from collections.abc import Callable, Sequence

import torch

from compress.runtime.decode_run import PendingTokens
from compress.runtime.generation import Generation
from compress.runtime.request import Reason, Request, TopLogprobs
from compress.runtime.sampler import likeliest

Observer = Callable[[Sequence[Request], Sequence[int], torch.Tensor], None]
"""A function of requests, the positions of the tokens just chosen for them, and the logits [R, V] they were
chosen from."""


class TokenReader:
    """Appends tokens to requests. `wait_s` is the time spent waiting for the device, in seconds; `observer`,
    if set, is called with the logits of every token.
    """

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos = frozenset(eos_token_ids)
        self.wait_s = 0.0
        self.observer: Observer | None = None

    def read(
        self, generations: Sequence[Generation], pending: PendingTokens
    ) -> list[tuple[Generation, Reason]]:
        """Wait for the tokens of a pass and append them to their requests; return the requests that end with
        them, and why.
        """
        started = time.perf_counter()
        pending.wait()
        now = time.perf_counter()
        self.wait_s += now - started
        tokens = pending.read()
        logprobs = pending.logprobs
        likely = _likeliest(generations, pending)
        ends = list[tuple[Generation, Reason]]()
        lengths = [len(each.tokens) for each in generations] if self.observer is not None else []
        for row_idx, (generation, new) in enumerate(zip(generations, tokens, strict=True)):
            if generation.ended:
                continue  # it ended one step ago: these are the surplus tokens of a step launched ahead
            reason = generation.append(new, now, self._eos, None if logprobs is None else logprobs[row_idx])
            if row_idx in likely:
                count = len(generation.generated) - len(generation.top_logprobs)
                generation.top_logprobs += likely[row_idx][:count]
            if reason is not None:
                ends.append((generation, reason))
        if self.observer is not None:
            _observe(self.observer, generations, lengths, pending.logits)
        return ends


def _likeliest(generations: Sequence[Generation], pending: PendingTokens) -> dict[int, list[TopLogprobs]]:
    """Return, for each row that asks for them, the likeliest tokens at its positions."""
    wanted = {
        row_idx: each.request.params.top_logprobs
        for row_idx, each in enumerate(generations)
        if each.request.params.top_logprobs
    }
    return {row_idx: likeliest(pending.logits[row_idx], count) for row_idx, count in wanted.items()}


def _observe(
    observer: Observer, generations: Sequence[Generation], lengths: Sequence[int], logits_RQV: torch.Tensor
) -> None:
    """Call the observer with the tokens that each request has beyond its length before."""
    new = [
        (row_idx, position)
        for row_idx, length in enumerate(lengths)
        for position in range(length, len(generations[row_idx].tokens))
    ]
    rows = [row_idx for row_idx, _ in new]
    places = [position - lengths[row_idx] for row_idx, position in new]
    requests = [generations[row_idx].request for row_idx in rows]
    observer(requests, [position for _, position in new], logits_RQV[rows, places])
