"""One row a task: the accuracies of source and candidate, the drop with its interval, and a verdict.

Verdicts, at 5 % over all tasks side by side (Holm):

    worse, better                  the difference is more than chance
    no difference found            it is not, and a drop of `margin` is ruled out by the interval
    too few items to tell          it is not, and a drop of `margin` is not ruled out either

A task that stopped early has an interval and a p value that hold at whatever item one stops
(`sequential.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from compress.validate.stats import Estimate
from compress.validate.tasks.paired import (
    counts_of,
    detectable_and_needed,
    difference_p_value,
    drop_estimate,
    holm,
    is_two_valued,
)
from compress.validate.tasks.sequential import sequential_estimate, sequential_p_value
from compress.validate.tasks.task import ERROR, TaskScores

Verdict = Literal["worse", "better", "no difference found", "too few items to tell"]


@dataclass(frozen=True)
class TaskRow:
    """The comparison of both models on one task. `accuracy` is the mean score of the items; `drop` is
       source - candidate; `recovery` candidate / source, None where the source has nothing right.
    `num_lost` items were right before and are wrong now, `num_won` the other way round. `detectable_drop` is
       the smallest drop that these items show four times in five, `items_needed` how many would show one of
       `margin`.
    """

    name: str
    metric: str
    num_items: int
    num_available: int
    source: float
    candidate: float
    drop: Estimate
    recovery: float | None
    num_lost: int
    num_won: int
    two_valued: bool
    p_value: float
    p_holm: float
    margin: float
    detectable_drop: float
    items_needed: int
    verdict: Verdict
    sequential: bool
    facts: Mapping[str, Any]
    lost: Sequence[Mapping[str, str]]

    def metrics(self) -> dict[str, Estimate]:
        """Return the numbers that gates may limit, by their names."""
        return {f"tasks.{self.name}.accuracy_drop": self.drop}

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return asdict(self)


def task_rows(
    scores: Mapping[str, TaskScores], margins: Mapping[str, float], *, seed: int, error: float = ERROR
) -> list[TaskRow]:
    """Return the row of each task, by its name."""
    p_values = [
        (sequential_p_value if each.sequential else difference_p_value)(each.drops)
        for each in scores.values()
    ]
    return [
        _row(name, each, margins[name], p_value, p_holm, seed=seed, error=error)
        for (name, each), p_value, p_holm in zip(scores.items(), p_values, holm(p_values), strict=True)
    ]


def _row(
    name: str, scores: TaskScores, margin: float, p_value: float, p_holm: float, *, seed: int, error: float
) -> TaskRow:
    drops_N = scores.drops
    confidence = 1 - error
    drop = (
        sequential_estimate(drops_N, confidence=confidence)
        if scores.sequential
        else drop_estimate(drops_N, seed=seed, confidence=confidence)
    )
    detectable, needed = detectable_and_needed(drops_N, margin, confidence=confidence)
    lost, won = counts_of(drops_N)
    source = float(scores.source_N.mean())
    candidate = float(scores.candidate_N.mean())
    return TaskRow(
        name=name,
        metric=scores.metric,
        num_items=drops_N.size,
        num_available=scores.num_available,
        source=source,
        candidate=candidate,
        drop=drop,
        recovery=candidate / source if source else None,
        num_lost=lost,
        num_won=won,
        two_valued=is_two_valued(drops_N),
        p_value=p_value,
        p_holm=p_holm,
        margin=margin,
        detectable_drop=detectable,
        items_needed=needed,
        verdict=_verdict(drop, p_holm, margin, error),
        sequential=scores.sequential,
        facts=scores.facts,
        lost=scores.lost,
    )


def _verdict(drop: Estimate, p_holm: float, margin: float, error: float) -> Verdict:
    if p_holm < error:
        return "worse" if drop.value > 0 else "better"
    return "no difference found" if drop.upper <= margin else "too few items to tell"
