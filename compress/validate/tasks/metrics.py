"""Metrics: the score of an answer, 0 (wrong) or 1 (right).

Of an item with choices, whose log probabilities after the question are compared:

    accuracy            the likeliest choice is the right one
    accuracy_per_char   the choice with the largest log probability a character is (lm-eval's `acc_norm`)

Of an item with references:

    exact_match         the generated text is one of them, without spaces around
    contains            the generated text has one of them in it
    greedy_match        the reference is what greedy decoding gives, by one pass over question and reference
                        (the accuracy of LAMBADA)
"""

import re
from collections.abc import Sequence
from typing import Literal, get_args

from compress.errors import UsageError

Metric = Literal["accuracy", "accuracy_per_char", "exact_match", "contains", "greedy_match"]
METRICS: tuple[Metric, ...] = get_args(Metric)
CHOICE_METRICS: tuple[Metric, ...] = ("accuracy", "accuracy_per_char")
GENERATED_METRICS: tuple[Metric, ...] = ("exact_match", "contains")


def chosen(logprobs: Sequence[float], choices: Sequence[str], metric: Metric) -> int:
    """Return the index of the choice that the model takes; of equals, the first."""
    values = [
        logprob / max(len(choice), 1) if metric == "accuracy_per_char" else logprob
        for logprob, choice in zip(logprobs, choices, strict=True)
    ]
    return max(range(len(values)), key=values.__getitem__)


def extracted(text: str, pattern: re.Pattern[str] | None) -> str:
    """Return the answer in a generated text: its last match of the pattern (the first group, where there is
    one), or the whole text; without spaces around."""
    if pattern is None:
        return text.strip()
    matches = list(pattern.finditer(text))
    return (matches[-1][min(pattern.groups, 1)] or "").strip() if matches else ""


def is_match(answer: str, references: Sequence[str], metric: Metric, *, ignore_case: bool) -> bool:
    """Return whether an answer is, or has in it, one of the references."""

    def plain(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    wanted = [plain(each) for each in references]
    given = plain(answer)
    return given in wanted if metric == "exact_match" else any(each in given for each in wanted)


def pattern_of(text: str | None) -> re.Pattern[str] | None:
    """Return a regular expression, ready.

    Raises:
        UsageError: it is none.
    """
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f"'{text}' is not a regular expression: {error}.") from None
