"""What is measured of speculation: against the engine's own counts, against laws of acceptance, and advice
that follows from the times.
"""

from dataclasses import replace

import pytest
import torch

from compress.errors import UsageError
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Finished, Request, SamplingParams
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.proposer import ProposerOptions
from compress.runtime.speculative.speculation import Speculative
from compress.validate.acceptance import acceptance_rows, repeated_4grams, step_sizes
from compress.validate.payoff import SpeedRow, advise, predicted
from compress.validate.probed_proposer import ProbedOptions, ProposerProbe
from compress.validate.speculation import (
    Conditions,
    SpeculationEvidence,
    measure_speculation,
    step_costs,
)
from compress.validate.stats import Estimate
from tests.support.scripted_proposer import Scripted
from tests.support.tiny_decoder import LLAMA, tiny_arch, tiny_source

CPU = torch.device("cpu")
SOURCE = tiny_source(tiny_arch(LLAMA))
CONFIG = EngineConfig(max_batch_size=4, max_model_len=48)
PROMPTS = {"a": [(1, 2, 3), (4, 5, 6, 7), (9, 9)], "b": [(8, 7, 6), (5, 5, 5)]}
CONDITIONS = Conditions(
    PROMPTS, k=3, rule="rejection", batch_sizes=(1, 4), temperatures=(1.0, 0.0), output_tokens=20
)


def engine_for(speculative: Speculative | None) -> Engine:
    return Engine(SOURCE, device=CPU, config=replace(CONFIG, speculative=speculative))


def measured(
    proposers: dict[str, ProposerOptions], conditions: Conditions = CONDITIONS
) -> SpeculationEvidence:
    return measure_speculation(engine_for(None), engine_for, proposers, conditions)


def finished_at(times: list[float]) -> Finished:
    return Finished("0", (1,), tuple(range(len(times))), "length", 0.0, tuple(times))


def test_a_draft_that_is_the_model_is_always_kept() -> None:
    evidence = measured({"draft": DraftModel(SOURCE)})
    assert all(row.acceptance_length.value == 4 for row in evidence.acceptance)
    assert all(row.acceptance_rates == (1.0, 1.0, 1.0) for row in evidence.acceptance)
    assert evidence.metrics["acceptance_length"] == Estimate(4.0, 4.0, 4.0)


@pytest.mark.slow
def test_every_proposer_temperature_category_and_batch_size_has_its_row() -> None:
    evidence = measured({"draft": DraftModel(SOURCE), "ngram": NGram()})
    cells = [(name, t) for name in ("draft", "ngram") for t in (1.0, 0.0)]
    assert [(r.proposer, r.temperature, r.category) for r in evidence.acceptance] == [
        (*c, text) for c in cells for text in ("all", "a", "b")
    ]
    assert [(r.proposer, r.temperature, r.batch_size) for r in evidence.speed] == [
        (*c, size) for c in cells for size in (1, 4)
    ]
    assert [r.num_prompts for r in evidence.acceptance[:3]] == [5, 3, 2]
    assert all((row.num_equal is None) == (row.temperature > 0) for row in evidence.speed)
    assert evidence.equality == (
        18,
        18,
    )  # two proposers, greedy, four requests at batch 1 and five at batch 4


def test_a_prompt_that_fills_up_a_batch_counts_once() -> None:
    few = replace(CONDITIONS, prompts={"a": [(1, 2), (3, 4)]}, batch_sizes=(6,), temperatures=(0.0,))
    evidence = measured({"ngram": NGram()}, few)
    assert [row.num_prompts for row in evidence.acceptance] == [2]
    assert evidence.equality == (6, 6)


def test_the_rule_that_is_coupled_is_held_to_the_tokens_of_plain_sampling() -> None:
    evidence = measured({"ngram": NGram()}, replace(CONDITIONS, rule="coupled", temperatures=(0.8,)))
    assert evidence.equality == (9, 9)


@pytest.mark.slow
def test_a_change_of_greedy_tokens_is_seen() -> None:
    plain = engine_for(None)
    other = tiny_source(tiny_arch(LLAMA), seed=1)

    def wrong(speculative: Speculative) -> Engine:
        return Engine(other, device=CPU, config=replace(CONFIG, speculative=speculative))

    equal, compared = measure_speculation(plain, wrong, {"ngram": NGram()}, CONDITIONS).equality
    assert equal < compared == 9


def test_acceptance_is_that_of_the_engine_but_for_the_last_steps() -> None:
    """Counted from when tokens arrive, and by the engine: equal where every step has room for k proposals."""
    requests = [
        Request(str(idx), (1, idx), SamplingParams(25, seed=idx, ignore_eos=True)) for idx in range(4)
    ]
    scripts = {
        each.seed: [*one.prompt, *one.tokens]
        for one, each in zip(plain_run(requests), (r.params for r in requests), strict=True)
    }
    engine = engine_for(Speculative(Scripted(scripts, wrong_every=5), k=3))
    finished = engine.generate(requests)
    engine_counts = engine.acceptance
    assert engine_counts is not None
    sizes = [
        size for each in finished for size in step_sizes(each, 0)
    ]  # every step has room for no proposal at all
    assert sum(sizes) / len(sizes) == engine_counts.acceptance_length
    with_room = [size for each in finished for size in step_sizes(each, 3)]
    assert len(sizes) - 8 <= len(with_room) < len(sizes)


def plain_run(requests: list[Request]) -> list[Finished]:
    return engine_for(None).generate(requests)


def test_steps_without_room_for_all_proposals_are_left_out() -> None:
    one = finished_at(
        [0.0, 1.0, 1.0, 1.0, 2.0, 3.0, 3.0, 4.0]
    )  # the first token is the prompt's; steps of 3, 1, 2 and 1
    assert step_sizes(one, 0) == [3, 1, 2, 1]
    assert step_sizes(one, 2) == [3, 1, 2]
    assert step_sizes(one, 3) == [3, 1]
    assert step_sizes(one, 6) == [3]


def test_rates_add_up_to_the_acceptance_length() -> None:
    runs = [
        finished_at([0.0, 1.0, 1.0, 1.0, 2.0, 3.0, 3.0, 4.0]),
        finished_at([0.0, *map(float, range(1, 8))]),
    ]
    (row,) = acceptance_rows("draft", 1.0, runs, runs, categories=["a", "a"], k=2)
    assert row.num_steps == 3 + 5
    assert row.acceptance_length.value == (6 + 5) / 8
    assert row.acceptance_rates == (2 / 8, 1 / 8)
    assert 1 + sum(row.acceptance_rates) == row.acceptance_length.value
    assert (row.acceptance_length.lower, row.acceptance_length.upper) == (
        1.0,
        3.0,
    )  # no more is possible, whatever two prompts leave open


def test_repetition_is_the_share_of_4grams_that_came_before() -> None:
    assert repeated_4grams((1, 2, 3, 4, 5, 6)) == 0
    assert repeated_4grams((7,) * 8) == 4 / 5
    assert repeated_4grams((1, 2, 3)) == 0


def test_a_probed_proposer_proposes_its_own_and_idle_steps_cost_it_nothing() -> None:
    probe = ProposerProbe()
    plain = engine_for(Speculative(DraftModel(SOURCE), k=3))
    probed = engine_for(Speculative(ProbedOptions(DraftModel(SOURCE), probe), k=3))
    requests = CONDITIONS.requests(1.0, 4)
    assert [each.tokens for each in probed.generate(requests)] == [
        each.tokens for each in plain.generate(requests)
    ]
    assert not probe.seconds
    propose_s, verify_s = step_costs(probed, probe, requests[:2], 3)
    timed = len(probe.seconds)
    assert timed > 0
    assert propose_s > 0 < verify_s
    assert probe.mode == "own"
    probe.mode = "idle"
    idle = probed.generate([replace(each, params=replace(each.params, temperature=0.0)) for each in requests])
    greedy = engine_for(None).generate(CONDITIONS.requests(0.0, 4))
    assert [each.tokens for each in idle] == [each.tokens for each in greedy]
    assert len(probe.seconds) == timed


@pytest.mark.slow
def test_a_speed_up_proves_nothing_where_other_work_took_the_processor() -> None:
    quiet = row()
    disturbed = replace(quiet, unstable=True, instability="other work took 40 % of the processor time")
    acceptance = measured({"ngram": NGram()}).acceptance
    assert SpeculationEvidence(acceptance, (quiet, disturbed)).unproven == {}
    assert SpeculationEvidence(acceptance, (disturbed, quiet)).unproven == {
        "speedup": "other work took 40 % of the processor time"
    }


def test_conditions_without_uncertainty_or_room_are_refused() -> None:
    with pytest.raises(UsageError, match="at least two prompts"):
        replace(CONDITIONS, prompts={"a": [(1,)]})
    with pytest.raises(UsageError, match="has room for 3 proposals"):
        replace(CONDITIONS, output_tokens=4)


def row(**changes: float) -> SpeedRow:
    """A plain step of 10 ms, and half of the first, a quarter of the second proposals kept."""
    facts = {
        "tpot_ms_plain": 10.0,
        "tpot_ms": 8.0,
        "acceptance_length": 1.75,
        "draft_ms": 1.0,
        "verify_ms": 12.0,
        "draft_frac": 2 / 14,
    }
    speedup = changes.pop("speedup", 10 / 8)
    return SpeedRow("draft", 1.0, 4, 8, None, speedup=Estimate.exact(speedup), **{**facts, **changes})


def test_the_prediction_is_the_formula() -> None:
    found = predicted(row(), (0.5, 0.25))
    assert found.predicted_speedup == pytest.approx(10 * 1.75 / (2 * 1.0 + 12.0))
    assert found.best_k == 1
    assert found.best_k_speedup == pytest.approx(10 * 1.5 / (1.0 + 11.0))


@pytest.mark.parametrize(
    ("changes", "rates", "words"),
    [
        ({}, (0.5, 0.25), "Speculation pays at batch 4: 1.25 times as fast."),
        ({"verify_ms": 11.0, "draft_ms": 1.0}, (0.7, 0.05), "k = 1 is predicted to give 1.48"),
        (
            {"speedup": 0.9, "verify_ms": 20.0},
            (0.5, 0.25),
            "no faster draft helps: it takes an acceptance length above 2.20",
        ),
        (
            {"speedup": 0.9, "draft_ms": 5.0},
            (0.5, 0.25),
            "an acceptance length above 2.20, or a draft pass under 2.8 ms instead of 5",
        ),
        (
            {"speedup": 0.5, "verify_ms": 32.0},
            (0.5, 0.25),
            "most of it verification, and gives 3 tokens at best. Speculate at smaller",
        ),
        (
            {"speedup": 0.5, "draft_ms": 12.0},
            (0.5, 0.25),
            "most of it the draft, and gives 3 tokens at best.",
        ),
        ({"speedup": 0.9}, (0.5, 0.25), "Its times predict 1.25: the machine was disturbed"),
        ({"speedup": 0.9, "draft_ms": 4.0}, (0.95, -0.2), "k = 1 is predicted to give 1.30"),
    ],
)
def test_advice_follows_from_the_times(
    changes: dict[str, float], rates: tuple[float, float], words: str
) -> None:
    found = predicted(row(**changes), rates)
    assert found.advice is not None
    assert words in found.advice
    assert found.advice == advise(found, 2)
