"""Prompt lookup: what followed the last time the sequence ended like this (arXiv 2304.04487; as "prompt lookup decoding" by A. Saxena,
2023).

The longest ending of `max_ngram` to `min_ngram` tokens that occurred before, at its latest occurrence, and the tokens that came after it. A
search through the request's own tokens, on the host: it costs no weights, no cache and no state, and each step waits for the one before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.errors import UsageError
from compress.runtime.model_runner import Features, PrefillBatch
from compress.runtime.speculative import PROPOSERS
from compress.runtime.speculative.proposer import Drafts, Pages, Setting
from compress.runtime.speculative.state import RunningRow, SpeculativeState


@PROPOSERS.register("ngram")
@dataclass(frozen=True)
class NGram:
    """Endings of `max_ngram` tokens are looked for first, then shorter ones down to `min_ngram`.

    Raises:
        UsageError: no such lengths.
    """

    max_ngram: int = 4
    min_ngram: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise UsageError(
                f"ngram: min_ngram is {self.min_ngram} and max_ngram {self.max_ngram}; 1 <= min_ngram <= max_ngram."
            )

    def build(self, setting: Setting) -> "NGramProposer":
        return NGramProposer(self, setting.k)


class NGramProposer:
    weight_bytes = kv_bytes_per_token = 0
    feature_layers = ()
    on_device = False

    def __init__(self, options: NGram, k: int) -> None:
        self._options = options
        self._k = k

    def kernel_report(self) -> list[dict[str, Any]]:
        """No kernels."""
        return []

    def begin(self, pages: Pages, embed_VD: Tensor) -> None:
        """Nothing is kept."""

    def prefill(self, batch: PrefillBatch, features: Features | None, *, short: bool) -> None:
        """Nothing is kept."""

    def verified(self, features: Features, state: SpeculativeState, *, q_len: int) -> None:
        """Nothing is kept."""

    def propose(self, rows: Sequence[RunningRow], state: SpeculativeState) -> Drafts:
        """Fewer than k where the earlier occurrence is near the end, none where there is none."""
        drafts = [continuation(np.array(row.tokens), min(self._k, row.limit), self._options) for row in rows]
        tokens_RK = torch.zeros(len(rows), self._k, dtype=torch.int64)
        for row_idx, each in enumerate(drafts):
            tokens_RK[row_idx, : len(each)] = torch.from_numpy(each)
        return Drafts(tokens_RK, [len(each) for each in drafts])


def continuation(tokens: NDArray[np.int64], limit: int, options: NGram) -> NDArray[np.int64]:
    """At most `limit` tokens that followed the latest earlier occurrence of the sequence's ending."""
    for length in range(min(options.max_ngram, len(tokens) - 1), options.min_ngram - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], length)
        found = np.flatnonzero((windows == tokens[-length:]).all(axis=1))
        if len(found):
            start = int(found[-1]) + length
            return tokens[start : start + limit]
    return tokens[:0]
