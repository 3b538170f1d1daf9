"""Log probabilities of continuations against the canonical decoder, one sequence at a time."""

import pytest
import torch

from compress.errors import UsageError
from compress.runtime import continuation_logprobs
from compress.runtime.continuation_logprobs import score_continuations
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from tests.support.tiny_source import tiny_source


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_source(), device=torch.device("cpu"), config=EngineConfig(max_model_len=48))


def expected(engine: Engine, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Score the whole sequence by itself."""
    tokens = (context + continuation)[:-1][-engine.max_model_len :]
    logits_SV = engine.runner.score(torch.tensor([tokens]))[0]
    rows_TV = logits_SV[-len(continuation) :].double().log_softmax(dim=-1)
    picked = rows_TV[range(len(continuation)), continuation]
    return float(picked.sum()), rows_TV.argmax(dim=-1).tolist() == continuation


def random_pairs(num: int) -> list[tuple[list[int], list[int]]]:
    generator = torch.Generator().manual_seed(0)

    def some(most: int) -> list[int]:
        length = int(torch.randint(1, most + 1, (1,), generator=generator))
        return torch.randint(101, (length,), generator=generator).tolist()

    return [(some(40), some(7)) for _ in range(num)]


def test_ragged_batches_give_each_continuation_its_own_log_probability(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = random_pairs(30)
    found = score_continuations(engine, pairs)
    assert [each.logprob for each in found] == pytest.approx(
        [expected(engine, *pair)[0] for pair in pairs], rel=1e-4
    )
    monkeypatch.setattr(continuation_logprobs, "MAX_TOKENS", 60)
    assert [each.logprob for each in score_continuations(engine, pairs)] == pytest.approx(
        [each.logprob for each in found], rel=1e-4
    )


def test_the_continuation_of_greedy_decoding_is_called_greedy_and_another_is_not(engine: Engine) -> None:
    context = [5, 6, 7]
    tokens = list(context)
    for _ in range(4):
        tokens.append(int(engine.runner.score(torch.tensor([tokens]))[0, -1].argmax()))
    best = tokens[3:]
    other = [*best[:-1], (best[-1] + 1) % 101]
    found = score_continuations(engine, [(context, best), (context, other), (context, best[:2])])
    assert [each.is_greedy for each in found] == [True, False, True]
    assert found[0].logprob > found[1].logprob


def test_answers_of_one_letter_share_a_sequence(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    score_rows = engine.runner.score_rows
    monkeypatch.setattr(
        engine.runner, "score_rows", lambda tokens, rows: seen.extend(tokens) or score_rows(tokens, rows)
    )
    pairs = [([1, 2, 3], [letter]) for letter in (10, 11, 12, 13)]
    found = score_continuations(engine, pairs)
    assert seen == [(1, 2, 3)]
    assert [each.logprob for each in found] == pytest.approx(
        [expected(engine, *pair)[0] for pair in pairs], rel=1e-4
    )


def test_a_context_that_is_too_long_loses_its_beginning(engine: Engine) -> None:
    long = list(range(1, 90))
    found = score_continuations(engine, [(long, [3, 4])])[0]
    assert found.logprob == pytest.approx(expected(engine, long, [3, 4])[0], rel=1e-4)


def test_a_continuation_that_is_too_long_is_refused_and_an_empty_one_is_a_mistake_of_the_caller(
    engine: Engine,
) -> None:
    with pytest.raises(UsageError, match="model length is 48"):
        score_continuations(engine, [([1], list(range(60)))])
    with pytest.raises(ValueError, match="one token each"):
        score_continuations(engine, [([1], [])])
