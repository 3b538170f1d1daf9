"""Chunks of prompts fit the time between tokens that is wanted."""

import pytest

from compress.runtime.step_budget import FIRST_CHUNK, MIN_CHUNK, StepBudget


def test_without_a_target_there_is_no_limit() -> None:
    assert StepBudget(None).num_tokens is None


@pytest.mark.parametrize("target_ms", [12.0, 30.0, 5.0])
def test_the_chunk_that_is_found_takes_the_time_that_is_wanted(target_ms: float) -> None:
    """Steps of 5 ms, and 0.02 ms a prompt token."""
    budget = StepBudget(target_ms / 1e3)
    assert budget.num_tokens == FIRST_CHUNK
    now_s = 0.0
    chunk = 0
    for step in range(60):
        now_s += 5e-3 + 2e-5 * chunk
        budget.read(now_s)
        chunk = budget.num_tokens or 0 if step % 3 else 0
        budget.launched(chunk, beside_decodes=True)
    assert budget.num_tokens == pytest.approx(max(MIN_CHUNK, (target_ms - 5) / 0.02), rel=0.02)


def test_time_in_which_nothing_decodes_tells_nothing() -> None:
    budget = StepBudget(0.02)
    for _ in range(5):
        budget.launched(100, beside_decodes=False)
    budget.read(1.0)
    budget.launched(50, beside_decodes=True)
    budget.launched(4000, beside_decodes=False)  # the decodes have ended
    budget.read(50.0)
    assert budget.num_tokens == FIRST_CHUNK
