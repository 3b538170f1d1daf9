"""Prompt lookup (arXiv 2304.04487; "prompt lookup decoding", A. Saxena, 2023): propose what followed the same
tokens earlier.

The last `max_ngram` tokens of a request, or fewer down to `min_ngram`, are searched for among its earlier
tokens. The proposal is what followed their latest occurrence. The search runs on the host, so it needs no
weights, no cache and no state, and each step waits for the tokens of the one before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from compress.errors import UsageError
from compress.runtime.batch import Features, PrefillBatch
from compress.runtime.generation import Generation
from compress.runtime.model_runner import ModelRunner
from compress.runtime.speculative import PROPOSERS
from compress.runtime.speculative.proposer import CacheSizes, Drafts, ProposerSetting
from compress.runtime.speculative.state import SpeculativeState


@PROPOSERS.register("ngram")
@dataclass(frozen=True)
class NGram:
    """Options of prompt lookup: the last `max_ngram` tokens are searched for first, then fewer down to
    `min_ngram`.

    Raises:
        UsageError: the lengths are not 1 <= min_ngram <= max_ngram.
    """

    max_ngram: int = 4
    min_ngram: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise UsageError(
                f"ngram: min_ngram is {self.min_ngram} and max_ngram {self.max_ngram}; 1 <= min_ngram <= "
                "max_ngram."
            )

    def build(self, setting: ProposerSetting) -> "NGramProposer":
        """Return the proposer; there is nothing to load."""
        return NGramProposer(self, setting.k)


class NGramProposer:
    """Looks up proposals in the tokens of each request. It keeps nothing between steps."""

    weight_bytes = kv_bytes_per_token = bytes_per_request = 0
    feature_layers = ()
    num_rewritten_rows = num_tokens_after = 0
    on_device = False

    def __init__(self, options: NGram, k: int) -> None:
        self._options = options
        self._k = k

    def kernel_report(self) -> list[dict[str, Any]]:
        """Return no rows: it runs no kernels."""
        return []

    def begin(self, sizes: CacheSizes, target: ModelRunner) -> None:
        """Allocate nothing."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy nothing."""

    def prefill(self, batch: PrefillBatch, features: Features | None, *, short: bool) -> None:
        """Keep nothing."""

    def verified(self, features: Features, state: SpeculativeState, *, q_len: int) -> None:
        """Keep nothing."""

    def propose(self, generations: Sequence[Generation], state: SpeculativeState) -> Drafts:
        """Propose what followed the last tokens of each request: fewer than k near its end, none if they are
        new.
        """
        drafts = [continuation(np.array(each.tokens), self._k, self._options) for each in generations]
        tokens_RK = torch.zeros(len(generations), self._k, dtype=torch.int64)
        for row_idx, each in enumerate(drafts):
            tokens_RK[row_idx, : len(each)] = torch.from_numpy(each)
        return Drafts(tokens_RK, [len(each) for each in drafts])


def continuation(tokens: NDArray[np.int64], limit: int, options: NGram) -> NDArray[np.int64]:
    """Return at most `limit` tokens that followed the latest earlier occurrence of the last tokens of a
    sequence.
    """
    for length in range(min(options.max_ngram, len(tokens) - 1), options.min_ngram - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], length)
        found = np.flatnonzero((windows == tokens[-length:]).all(axis=1))
        if len(found):
            start = int(found[-1]) + length
            return tokens[start : start + limit]
    return tokens[:0]
