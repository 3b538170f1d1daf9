"""Log probabilities of continuations of given contexts: how likely each of several answers is.

Sequences run in ragged batches, the longest first, and the head runs on the rows that predict a
continuation alone. Continuations that differ in their last token only (the letters of a multiple-choice
question) share one sequence.

Shapes: W rows that predict tokens of continuations, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from compress.runtime.engine import Engine

MAX_TOKENS = 8192
"""Tokens of a batch: enough to fill a large GPU, at 2 bytes x 8,192 channels 128 MiB of activations."""
MAX_LOGITS = 1 << 27
"""Float32 logits of a batch: half a gigabyte, or those of one sequence."""


@dataclass(frozen=True)
class ContinuationLogprob:
    """The natural logarithm of the probability of a continuation, and whether each of its tokens is the
    likeliest one after those before it."""

    logprob: float
    is_greedy: bool


Pair = tuple[Sequence[int], Sequence[int]]
"""Tokens of a context, at least one, and of its continuation, at least one."""


@torch.inference_mode()
def score_continuations(engine: Engine, pairs: Sequence[Pair]) -> list[ContinuationLogprob]:
    """Return the log probability of each continuation, in the order of the pairs. A context that is too
    long for the engine loses its beginning. No step of the engine may run at the same time.

    Raises:
        ValueError: a context or a continuation is empty.
        UsageError: a continuation alone is longer than the engine's longest sequence.
    """
    sequences: dict[tuple[int, ...], list[int]] = {}
    for idx, (context, continuation) in enumerate(pairs):
        if not context or not continuation:
            raise ValueError("a context and its continuation have one token each at least")
        whole = (*context, *continuation)[:-1]
        kept = max(engine.max_model_len, len(continuation))
        sequences.setdefault(whole[-kept:], []).append(idx)
    found: list[ContinuationLogprob | None] = [None] * len(pairs)
    for batch in _batches(engine, sequences, pairs):
        _score(engine, {each: sequences[each] for each in batch}, pairs, found)
    return [each for each in found if each is not None]


def _batches(
    engine: Engine, sequences: dict[tuple[int, ...], list[int]], pairs: Sequence[Pair]
) -> Iterator[list[tuple[int, ...]]]:
    """Yield the sequences of each batch: equal lengths side by side, so that attention's blocks are full."""
    max_rows = max(1, MAX_LOGITS // engine.arch.vocab_size)
    batch: list[tuple[int, ...]] = []
    num_tokens = 0
    num_rows = 0
    for each in sorted(sequences, key=len, reverse=True):
        own_rows = max(len(pairs[idx][1]) for idx in sequences[each])
        if batch and (num_tokens + len(each) > MAX_TOKENS or num_rows + own_rows > max_rows):
            yield batch
            batch = []
            num_tokens = 0
            num_rows = 0
        batch.append(each)
        num_tokens += len(each)
        num_rows += own_rows
    if batch:
        yield batch


def _score(
    engine: Engine,
    sequences: dict[tuple[int, ...], list[int]],
    pairs: Sequence[Pair],
    found: list[ContinuationLogprob | None],
) -> None:
    """Fill in the results of one batch."""
    wanted: list[int] = []
    places: list[tuple[int, int]] = []  # index of a pair, and its first row among the wanted ones
    end = 0
    for tokens, indices in sequences.items():
        end += len(tokens)
        most = max(len(pairs[idx][1]) for idx in indices)
        wanted += range(end - most, end)
        places += [(idx, len(wanted) - len(pairs[idx][1])) for idx in indices]
    logits_WV = engine.runner.score_rows(list(sequences), wanted)
    total_W = logits_WV.logsumexp(dim=-1)
    best_W = logits_WV.argmax(dim=-1)
    rows = [row for idx, first in places for row in range(first, first + len(pairs[idx][1]))]
    targets = [token for idx, _ in places for token in pairs[idx][1]]
    rows_T = torch.tensor(rows, device=logits_WV.device)
    targets_T = torch.tensor(targets, device=logits_WV.device)
    logprobs = (logits_WV[rows_T, targets_T] - total_W[rows_T]).tolist()
    greedy = (best_W[rows_T] == targets_T).tolist()
    start = 0
    for idx, _ in places:
        stop = start + len(pairs[idx][1])
        found[idx] = ContinuationLogprob(sum(logprobs[start:stop]), all(greedy[start:stop]))
        start = stop
