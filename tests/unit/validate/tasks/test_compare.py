"""Rows of tasks: verdicts, and what gates see."""

import numpy as np
import pytest

from compress.validate.tasks.compare import TaskRow, task_rows
from compress.validate.tasks.task import TaskScores


def scores(lost: int, won: int, num: int, *, right: int = 0, sequential: bool = False) -> TaskScores:
    source = np.zeros(num)
    candidate = np.zeros(num)
    source[: lost + right] = 1
    candidate[lost : lost + right + won] = 1
    return TaskScores("accuracy", source, candidate, num, sequential=sequential)


def row(found: TaskScores, margin: float = 0.01) -> TaskRow:
    return task_rows({"mine": found}, {"mine": margin}, seed=0)[0]


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (scores(60, 10, 1000, right=500), "worse"),
        (scores(10, 60, 1000, right=500), "better"),
        (scores(10, 10, 10_000, right=500), "no difference found"),
        (scores(10, 10, 500, right=100), "too few items to tell"),
        (scores(0, 0, 100, right=50), "too few items to tell"),
        (scores(0, 0, 5000, right=50), "no difference found"),
        (scores(0, 0, 5000, right=50, sequential=True), "no difference found"),
        (scores(300, 10, 2000, right=900, sequential=True), "worse"),
    ],
)
def test_verdicts(found: TaskScores, verdict: str) -> None:
    assert row(found).verdict == verdict


def test_accuracies_recovery_and_counts() -> None:
    found = row(scores(20, 5, 1000, right=480))
    assert (found.source, found.candidate) == (0.5, 0.485)
    assert found.recovery == pytest.approx(0.97)
    assert found.drop.value == pytest.approx(0.015)
    assert (found.num_lost, found.num_won) == (20, 5)
    assert found.metrics() == {"tasks.mine.accuracy_drop": found.drop}
    assert row(scores(0, 5, 100)).recovery is None


def test_a_difference_that_is_found_alone_may_be_chance_among_many_tasks() -> None:
    alone = scores(20, 6, 1000, right=500)
    others = {f"other{idx}": scores(5, 5, 1000, right=500) for idx in range(9)}
    assert row(alone).verdict == "worse"
    rows = task_rows({"mine": alone, **others}, dict.fromkeys(("mine", *others), 0.01), seed=0)
    assert rows[0].p_value == row(alone).p_value < 0.05 < rows[0].p_holm
    assert rows[0].verdict == "too few items to tell"


def test_more_items_are_needed_for_a_smaller_margin() -> None:
    found = scores(30, 20, 1000, right=500)
    assert row(found, 0.005).items_needed > 3.5 * row(found, 0.01).items_needed
    assert row(found).items_needed > 1000 if row(found).detectable_drop > 0.01 else True
