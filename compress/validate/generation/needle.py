"""A fact in a long text, to be found again (a "needle in a haystack"): does a compressed model, or a
quantized KV cache, still read what lies far back?

A text of evaluation tokens has one sentence, "The number of the red door is 48213.", at a depth from 0
(its beginning) to 1 (its end), and after the text comes "The number of the red door is". The answer counts
as found if greedy decoding gives its digits; the log probability of a digit shows more, and also where
neither model finds it. Both models read the same texts; one pass over each, no generation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from compress.errors import UsageError
from compress.runtime.continuation_logprobs import Pair, score_continuations
from compress.validate.stats import Estimate, mean_estimate
from compress.validate.tasks.text_model import TextModel

THINGS = ("door", "key", "boat", "lamp", "book", "road", "tower", "garden")
COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey")


@dataclass(frozen=True)
class NeedleRow:
    """One model, length of the text and depth of the fact. `logprob` is the mean of a digit's, and `change`
    that of this model less that of the source, paired by text."""

    model: str
    length: int
    depth: float
    num_texts: int
    found: float
    logprob: float
    change: Estimate | None

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return asdict(self)


def needle_pairs(
    model: TextModel, texts: Sequence[Sequence[int]], *, length: int, depth: float, seed: int
) -> list[Pair]:
    """Return a context of `length` tokens, answer included, for each text of tokens, and the tokens of the
    answer.

    Raises:
        UsageError: the length leaves no room for text.
    """
    rng = np.random.default_rng([seed, length, round(depth * 1000)])
    pairs: list[Pair] = []
    for text in texts:
        name = f"The number of the {rng.choice(COLOURS)} {rng.choice(THINGS)} is"
        number = f" {rng.integers(10_000, 100_000)}"
        fact = model.encode(f" {name}{number}. ", add_bos=False)
        question = model.encode(f" {name}", add_bos=False)
        answer = model.encode(number, add_bos=False)
        room = length - len(fact) - len(question) - len(answer)
        if room < 8 or room > len(text):
            raise UsageError(
                f"a needle in {length} tokens needs that many tokens of text and more than the "
                f"{length - room} of the "
                f"fact and its question; {len(text)} tokens of text were given. Set other lengths."
            )
        place = 1 + round(depth * (room - 1))  # after the first token, which may begin the sequence
        pairs.append(([*text[:place], *fact, *text[place:room], *question], answer))
    return pairs


def probe(
    models: Mapping[str, TextModel],
    texts: Sequence[Sequence[int]],
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    seed: int,
) -> list[NeedleRow]:
    """Return one row for each model, length and depth; the first model is the source.

    Raises:
        UsageError: a length leaves no room for text, or is more than there is text.
    """
    rows = []
    for length in lengths:
        for depth in depths:
            before: np.ndarray | None = None
            for name, model in models.items():
                pairs = needle_pairs(model, texts, length=length, depth=depth, seed=seed)
                scores = score_continuations(model.engine, pairs)
                logprobs_N = np.array(
                    [score.logprob / len(answer) for score, (_, answer) in zip(scores, pairs, strict=True)]
                )
                rows.append(
                    NeedleRow(
                        model=name,
                        length=length,
                        depth=depth,
                        num_texts=len(pairs),
                        found=float(np.mean([each.is_greedy for each in scores])),
                        logprob=float(logprobs_N.mean()),
                        change=None if before is None else mean_estimate(logprobs_N - before),
                    )
                )
                before = logprobs_N if before is None else before
    return rows
