"""One metric of two models: how much it changes from the second to the first, with the change's interval.

    paired      both list the means of the same windows: Student's interval of the differences, window by
                window (of logarithms, for perplexity)
    unpaired    from the farthest ends of both intervals, so that it holds no change where they overlap

A change is stated only where both readings have the same conditions and prove something. Pairs are judged one
by one at the confidence of the reports: of twenty independent pairs of equal models, one may be called
different.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from compress.validate.compare.evidence import Evidence, Reading
from compress.validate.stats import Array, Estimate, mean_estimate

Verdict = Literal["better", "worse", "equal", "undecided", "incomparable"]
CONDITION_WORDS = {
    "source": "another source model",
    "text": "other evaluation tokens",
    "machine": "another machine",
    "latency": "requests of another shape",
    "load": "another load",
}


@dataclass(frozen=True)
class Compared:
    """A metric: whether smaller is better, whether its change is a ratio or a difference, the conditions that
    both readings must share, and the list of window means that pairs them.
    """

    words: str
    smaller: bool
    ratio: bool
    conditions: tuple[str, ...] = ()
    windows: str = ""

    @property
    def no_change(self) -> float:
        """The change of a model against itself."""
        return 1.0 if self.ratio else 0.0


COMPARED: Mapping[str, Compared] = {
    "size_bytes": Compared("size", smaller=True, ratio=True),
    "kl_mean": Compared("KL", smaller=True, ratio=False, conditions=("source", "text"), windows="kl"),
    "ppl": Compared("perplexity", smaller=True, ratio=True, conditions=("text",), windows="nll_candidate"),
    "top1": Compared("top-1", smaller=False, ratio=False, conditions=("source", "text"), windows="top1"),
    "ttft_ms_p50": Compared("TTFT", smaller=True, ratio=True, conditions=("machine", "latency")),
    "tpot_ms_p50": Compared("TPOT", smaller=True, ratio=True, conditions=("machine", "latency")),
    "output_throughput": Compared("throughput", smaller=False, ratio=True, conditions=("machine", "load")),
}


TASKS = "tasks."
"""The start of the metric of a task, `tasks.<name>`: the share of its items that are right."""


def is_metric(name: str) -> bool:
    """Return whether a name is that of a metric that models are compared in."""
    return name in COMPARED or (name.startswith(TASKS) and name != TASKS)


def compared_of(metric: str) -> Compared:
    """Return the facts of a metric; those of a task hold for the same items and the same source only, because
    its interval is that of the paired difference to the source.
    """
    if metric.startswith(TASKS):
        words = metric.removeprefix(TASKS)
        return Compared(words, smaller=False, ratio=False, conditions=("source", metric))
    return COMPARED[metric]


@dataclass(frozen=True)
class Difference:
    """The change from the second model to the first; None, with a reason, where none is stated.

    `verdict` is about the first model: better, worse, equal (no change at all), undecided (the interval holds
    no change), or incomparable (other conditions, not measured, or a measurement that proves nothing).
    """

    metric: str
    change: Estimate | None
    paired: bool
    verdict: Verdict
    reason: str = ""


def difference(metric: str, one: Evidence, other: Evidence) -> Difference:
    """Return how a metric of `one` compares with that of `other`."""
    facts = compared_of(metric)
    readings = []
    for each in (one, other):
        if metric not in each.readings:
            return _none(metric, "incomparable", f"not measured for {each.label}")
        readings.append(each.readings[metric])
    for name in facts.conditions:
        if one.conditions.get(name) != other.conditions.get(name) or name not in one.conditions:
            return _none(metric, "incomparable", CONDITION_WORDS.get(name, "other items"))
    if any(reading.unproven for reading in readings):
        return _none(metric, "incomparable", "unstable")
    windows = [each.windows.get(facts.windows) for each in (one, other)]
    pair = [each for each in windows if each is not None]
    paired = len(pair) == 2 and pair[0].size == pair[1].size
    change = _paired(pair[0], pair[1], facts) if paired else _unpaired(readings[0], readings[1], facts)
    if change is None:
        return _none(metric, "undecided", "an interval reaches zero")
    return Difference(metric, change, paired, _verdict(change, facts))


def _none(metric: str, verdict: Verdict, reason: str) -> Difference:
    return Difference(metric, None, paired=False, verdict=verdict, reason=reason)


def _paired(one_N: Array, other_N: Array, facts: Compared) -> Estimate:
    found = mean_estimate(one_N - other_N)
    if not facts.ratio:
        return found
    return Estimate(math.exp(found.value), math.exp(found.lower), math.exp(found.upper))


def _unpaired(one: Reading, other: Reading, facts: Compared) -> Estimate | None:
    a = one.estimate
    b = other.estimate
    if not facts.ratio:
        return Estimate(a.value - b.value, a.lower - b.upper, a.upper - b.lower)
    if b.lower <= 0:
        return None
    return Estimate(a.value / b.value, a.lower / b.upper, a.upper / b.lower)


def _verdict(change: Estimate, facts: Compared) -> Verdict:
    if change.lower == change.upper == facts.no_change:
        return "equal"
    if change.lower <= facts.no_change <= change.upper:
        return "undecided"
    return "better" if (change.upper < facts.no_change) == facts.smaller else "worse"
