"""Rejection sampling against the model's own distribution: chi-square tests of stated power, which a broken
rule does not pass.

A test here rejects at significance 1e-4. Its power is computed, not assumed: a wrong rule with cell
probabilities r gives, for N draws, a noncentral chi-square with N sum (r - p)^2 / p (Patnaik 1949), and
`power` is the chance that it lies above the limit.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chi2, ncx2
from torch import Tensor

from compress.kernels.step.verify import leading
from compress.models.random_source import RandomSource
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from compress.runtime.sampler import SamplingPlan, SamplingRows, distribution, gumbel, sample_rows
from compress.runtime.speculative import acceptance
from compress.runtime.speculative.acceptance import PROPOSAL_STREAM, accept_by_rejection, stream
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.speculation import Speculative
from tests.support.scripted_proposer import acceptance_of
from tests.support.slow import slow
from tests.support.tiny_decoder import LLAMA, tiny_arch

CPU = torch.device("cpu")
SIGNIFICANCE = 1e-4
PARAMS = {
    "temperature 1": SamplingParams(1, temperature=1.0),
    "temperature 0.6": SamplingParams(1, temperature=0.6),
    "top_k": SamplingParams(1, temperature=1.0, top_k=4),
    "top_p": SamplingParams(1, temperature=1.3, top_p=0.7),
    "min_p": SamplingParams(1, temperature=1.0, min_p=0.15),
    "all": SamplingParams(1, temperature=0.9, top_k=6, top_p=0.9, min_p=0.02),
}


def chi_square(counts: Tensor, probs: Tensor) -> tuple[float, float]:
    """Statistic and limit. Cells of fewer than five expected draws are one; a draw that cannot be is
    infinitely wrong.
    """
    expected = probs * counts.sum()
    if counts[probs == 0].sum():
        return float("inf"), 0.0
    common = expected >= 5
    observed = torch.cat((counts[common], counts[~common].sum().view(1))).double()
    expected = torch.cat((expected[common], expected[~common].sum().view(1)))
    observed = observed[expected > 0]
    expected = expected[expected > 0]
    return float(((observed - expected).square() / expected).sum()), float(
        chi2.ppf(1 - SIGNIFICANCE, len(expected) - 1)
    )


def power(num_draws: int, probs: Tensor, wrong: Tensor) -> float:
    """Chance that the test catches draws from `wrong`, which has no cell that `probs` has not."""
    real = probs > 0
    noncentrality = num_draws * float(((wrong - probs).square()[real] / probs[real]).sum())
    cells = int(real.sum())
    return float(ncx2.sf(chi2.ppf(1 - SIGNIFICANCE, cells - 1), cells - 1, noncentrality))


def rows_of(params: SamplingParams, num_rows: int) -> SamplingRows:
    return replace(SamplingRows.of([params], CPU).repeated(num_rows), seeds_R=torch.arange(num_rows))


def first_tokens(
    p_logits: Tensor, q_logits: Tensor, params: SamplingParams, num_draws: int, *, certain: bool
) -> tuple[Tensor, Tensor]:
    """The first two tokens [N, 2] after two proposals, whose distributions do not depend on what is before,
    and how many were kept [N].
    """
    rows = rows_of(params, num_draws)
    plan = SamplingPlan.of([params])
    first = torch.full((num_draws,), 9)
    p_NQV = p_logits.expand(num_draws, 3, -1)
    if certain:
        drafts = torch.tensor([2, 5]).expand(num_draws, 2)
        probs = None
    else:
        proposing = stream(rows, PROPOSAL_STREAM)
        q_NKV = q_logits.expand(num_draws, 2, -1)
        drafts = torch.stack(
            [sample_rows(q_NKV[:, place], proposing, first + place, plan).tokens_R for place in range(2)],
            dim=1,
        )
        probs = distribution(q_NKV.flatten(0, 1), proposing.repeated(2), plan).view(num_draws, 2, -1)
    positions = (first.unsqueeze(1) + torch.arange(3)).flatten()
    chosen = sample_rows(p_NQV.flatten(0, 1), rows.repeated(3), positions, plan).tokens_R.view(num_draws, 3)
    kept = accept_by_rejection(p_NQV, chosen, drafts, torch.full((num_draws,), 2), first, rows, plan, probs)
    # A row that rejected its first proposal goes on plainly: its next token is the model's own choice there.
    second = torch.where(kept.num_accepted_R > 0, kept.tokens_RQ[:, 1], chosen[:, 1])
    return torch.stack((kept.tokens_RQ[:, 0], second), dim=1), kept.num_accepted_R


def two_models(vocab_size: int = 8) -> tuple[Tensor, Tensor]:
    """Logits [3, V] and [2, V]; the second differ as a draft's do."""
    generator = torch.Generator().manual_seed(0)
    p_logits = 1.5 * torch.randn(3, vocab_size, generator=generator)
    return p_logits, p_logits[:2] + torch.randn(2, vocab_size, generator=generator)


def exact(logits: Tensor, params: SamplingParams) -> Tensor:
    return distribution(logits, rows_of(params, len(logits)), SamplingPlan.of([params]))


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.one_in(4)
def test_tokens_have_the_models_distribution(params: SamplingParams, certain: bool) -> None:
    """60,000 pairs of neighbouring tokens: a rule that replaces from p, not from p - q, would be found with
    probability above 0.9999.
    """
    num_draws = 60_000
    (p_logits, q_logits) = two_models()
    tokens, accepted = first_tokens(p_logits, q_logits, params, num_draws, certain=certain)
    p_QV = exact(p_logits, params)
    q_KV = torch.eye(8, dtype=torch.float64)[[2, 5]] if certain else exact(q_logits, params)
    pairs = (p_QV[0].unsqueeze(1) * p_QV[1]).flatten()
    counts = torch.bincount(tokens[:, 0] * 8 + tokens[:, 1], minlength=64)
    statistic, limit = chi_square(counts, pairs)
    assert statistic < limit

    overlap = torch.minimum(p_QV[:2], q_KV)
    kept = overlap.sum(dim=1)  # 1 - total variation: how often a proposal is kept
    assert abs(float((accepted > 0).double().mean() - kept[0])) < 5 * 0.5 / num_draws**0.5
    assert abs(float((accepted > 1).double().mean() - kept[0] * kept[1])) < 5 * 0.5 / num_draws**0.5
    wrong = overlap[0] + (1 - kept[0]) * p_QV[0]
    if kept[0] > 0:
        assert power(num_draws, p_QV[0], wrong) > 0.9999


BROKEN: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "replaces from p": lambda patch: patch.setattr(acceptance, "_at", _without_q()),
    "keeps everything": lambda patch: patch.setattr(
        acceptance, "_uniform", lambda seeds, positions: torch.zeros(positions.shape)
    ),
    "keeps by the noise of the proposal": lambda patch: patch.setattr(
        acceptance, "KEEP_STREAM", PROPOSAL_STREAM
    ),
    "replaces by the noise of the proposal": lambda patch: patch.setattr(
        acceptance, "gumbel", lambda seeds, positions, size: gumbel(seeds ^ PROPOSAL_STREAM, positions, size)
    ),
}


def _without_q() -> Callable[[Tensor, Tensor], Tensor]:
    true_at = acceptance._at
    return lambda each, place: true_at(each, place) * (each.shape[1] == 3)  # p has three places, q two


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_rule_is_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN[broken](monkeypatch)
    p_logits, q_logits = two_models()
    params = PARAMS["temperature 1"]
    tokens, _ = first_tokens(p_logits, q_logits, params, 60_000, certain=False)
    p_QV = exact(p_logits, params)
    counts = torch.bincount(tokens[:, 0] * 8 + tokens[:, 1], minlength=64)
    statistic, limit = chi_square(counts, (p_QV[0].unsqueeze(1) * p_QV[1]).flatten())
    assert statistic > limit


def test_greedy_rows_are_coupled_whatever_the_rule() -> None:
    logits = torch.randn(50, 3, 8, generator=torch.Generator().manual_seed(1))
    chosen = logits.argmax(dim=-1)
    drafts = torch.where(
        torch.rand(50, 2, generator=torch.Generator().manual_seed(2)) < 0.7, chosen[:, :2], 0
    )
    counts = torch.arange(50) % 3
    first = torch.full((50,), 4)
    params = [SamplingParams(1, temperature=float(idx % 2)) for idx in range(50)]
    plan = SamplingPlan.of(params)
    rows = SamplingRows.of(params, CPU)
    kept = accept_by_rejection(logits, chosen, drafts, counts, first, rows, plan, None)
    expected = leading(drafts == chosen[:, :-1], counts).tolist()
    for row in range(0, 50, 2):
        num_accepted = expected[row]
        assert int(kept.num_accepted_R[row]) == num_accepted
        assert kept.tokens_RQ[row, : num_accepted + 1].tolist() == chosen[row, : num_accepted + 1].tolist()


def test_only_the_leading_proposals_that_agree_are_kept() -> None:
    chosen = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    drafts = torch.tensor([[1, 2, 3], [1, 0, 3], [0, 2, 3], [1, 2, 3]])
    assert leading(drafts == chosen[:, :-1], torch.tensor([3, 3, 3, 1])).tolist() == [3, 1, 0, 1]


def sources(vocab_size: int) -> tuple[RandomSource, RandomSource]:
    """Two models with nothing in common."""
    facts: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "head_dim": 8,
        "num_hidden_layers": 1,
        "eos_token_id": vocab_size - 1,
    }
    arch = tiny_arch(LLAMA, **facts, vocab_size=vocab_size)
    target, draft = (RandomSource(arch, device=CPU, dtype=torch.float32, seed=seed) for seed in (0, 1))
    return target, draft


@pytest.mark.parametrize("proposer", [slow("draft_model"), "ngram"])
def test_what_the_engine_draws_by_rejection_has_the_models_distribution(proposer: str) -> None:
    """4,000 continuations of three tokens from six, 216 cells. Proposals kept unseen would be found with
    probability above 0.999.
    """
    vocab_size = 6
    num_draws = 4_000
    prompt = (1, 2, 1, 2, 1)
    target, draft = sources(vocab_size)
    params = SamplingParams(3, temperature=1.2, ignore_eos=True)
    speculative = Speculative(
        DraftModel(draft) if proposer == "draft_model" else NGram(), k=2, rule="rejection"
    )
    engine = Engine(target, device=CPU, config=EngineConfig(max_batch_size=64, speculative=speculative))
    finished = engine.generate(
        [Request(str(seed), prompt, replace(params, seed=seed)) for seed in range(num_draws)]
    )
    tokens = torch.tensor([each.tokens for each in finished])
    counts = torch.bincount(tokens @ torch.tensor([36, 6, 1]), minlength=216)

    def next_probs(source: RandomSource) -> list[Tensor]:
        """p(t1), p(t2 | t1), p(t3 | t1 t2), each [6 ** n]."""
        cells = torch.cartesian_prod(*[torch.arange(vocab_size)] * 3)
        sequences = torch.cat((torch.tensor(prompt).expand(216, -1), cells), dim=1)
        logits = Engine(source, device=CPU).runner.score(sequences)[:, len(prompt) - 1 : -1]
        probs = (logits.double() / params.temperature).softmax(dim=-1)
        return list(probs.gather(2, cells.unsqueeze(2)).squeeze(2).unbind(1))

    own = next_probs(target)
    theirs = next_probs(draft)
    statistic, limit = chi_square(counts, own[0] * own[1] * own[2])
    assert statistic < limit
    accepted = acceptance_of(engine)
    assert 0.05 < accepted.rates[0] < 0.95
    if proposer == "draft_model":
        assert power(num_draws, own[0] * own[1] * own[2], own[0] * theirs[1] * own[2]) > 0.999
