"""Sampling: greedy, filters, and noise that is a pure function of (seed, position, token)."""

import math

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from compress.errors import UsageError
from compress.runtime.request import SamplingParams
from compress.runtime.sampler import SamplingPlan, SamplingRows, gumbel, sample, sample_rows

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """splitmix64's finalizer in Python integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def expected_noise(seed: int, position: int, token: int) -> float:
    key = mix((mix((seed + GOLDEN) & MASK) + position * GOLDEN) & MASK)
    bits = mix((key + (token + 1) * GOLDEN) & MASK) >> 12
    return -math.log(-math.log((bits + 0.5) / 2**52))


def draws(logits_V: Tensor, num_draws: int, **params: float) -> Tensor:
    """Tokens of one distribution at `num_draws` positions."""
    each = SamplingParams(1, **{"temperature": 1.0, **params})  # type: ignore[arg-type]
    return sample(logits_V.expand(num_draws, -1), [each] * num_draws, range(num_draws)).tokens_R


def test_noise_is_splitmix64_of_seed_position_and_token() -> None:
    seeds = [0, 1, (1 << 63) - 1, 12345]
    positions = [0, 7, 100_000, 2]
    noise = gumbel(torch.tensor(seeds), torch.tensor(positions), 5)
    expected = [
        [expected_noise(seed, position, token) for token in range(5)]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    torch.testing.assert_close(noise, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, -1.0, 5.0]])
    assert sample(logits, [SamplingParams(1)] * 3, [4, 5, 6]).tokens_R.tolist() == [1, 0, 3]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_tokens_are_drawn_with_softmax_probabilities(temperature: float) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(3)) * 2
    num_draws = 20_000
    counts = torch.bincount(draws(logits, num_draws, temperature=temperature, seed=11), minlength=40).to(
        torch.float64
    )
    expected = (logits.to(torch.float64) / temperature).softmax(0) * num_draws
    common = expected >= 5  # the usual condition of the test; the rest is one class
    observed = torch.cat((counts[common], counts[~common].sum().view(1)))
    expected = torch.cat((expected[common], expected[~common].sum().view(1)))
    observed = observed[expected > 0]
    expected = expected[expected > 0]
    statistic = float(((observed - expected).square() / expected).sum())
    assert statistic < chi2.ppf(1 - 1e-4, df=len(expected) - 1)


def test_neighbouring_seeds_and_positions_draw_independently() -> None:
    uniform = torch.zeros(16)
    by_seed = [draws(uniform, 4_000, seed=seed) for seed in (0, 1)]
    pairs = [(by_seed[0], by_seed[1]), (by_seed[0][:-1], by_seed[0][1:])]
    for first, second in pairs:
        counts = torch.bincount(first * 16 + second, minlength=256).to(torch.float64)
        expected = len(first) / 256
        assert float(((counts - expected).square() / expected).sum()) < chi2.ppf(1 - 1e-4, df=255)


def test_a_row_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(9, 301, generator=generator)
    params = [
        SamplingParams(
            1,
            temperature=0.3 * row,
            top_k=row * 5,
            top_p=1 - row / 20,
            min_p=row / 100,
            seed=row,
            logprobs=row % 2 == 0,
        )
        for row in range(9)
    ]
    positions = [row * 3 for row in range(9)]
    together = sample(logits, params, positions).tokens_R.tolist()
    assert [
        int(sample(logits[row : row + 1], [params[row]], [positions[row]]).tokens_R) for row in range(9)
    ] == together
    order = [4, 0, 8, 2, 6, 1, 7, 3, 5]
    shuffled = sample(
        logits[order], [params[row] for row in order], [positions[row] for row in order]
    ).tokens_R.tolist()
    assert shuffled == [together[row] for row in order]


def test_a_row_has_the_same_token_under_every_plan_that_serves_it() -> None:
    logits = torch.randn(8, 501, generator=torch.Generator().manual_seed(6)) * 3
    params = [
        SamplingParams(1, temperature=0.5 * (row % 3), min_p=0.1 * (row % 2), seed=row) for row in range(8)
    ]
    rows = SamplingRows.of(params, torch.device("cpu"))
    positions = torch.arange(8)
    least = SamplingPlan.of(params)
    assert least == SamplingPlan(draws=True, filters=False, logprobs=False)
    tokens = sample_rows(logits, rows, positions, least).tokens_R
    assert torch.equal(
        sample_rows(logits, rows, positions, SamplingPlan(draws=True, filters=True, logprobs=True)).tokens_R,
        tokens,
    )
    greedy = [row for row in range(8) if row % 3 == 0]
    assert torch.equal(logits.argmax(dim=-1)[greedy], tokens[greedy])


def test_a_plan_asks_for_no_more_than_its_rows() -> None:
    greedy = SamplingParams(1, top_k=5)
    drawn = SamplingParams(1, temperature=1.0, min_p=0.1)
    assert (
        SamplingPlan.of([])
        == SamplingPlan.of([greedy])
        == SamplingPlan(draws=False, filters=False, logprobs=False)
    )
    assert SamplingPlan.of([greedy, drawn]) == SamplingPlan(draws=True, filters=False, logprobs=False)
    for filtered in (
        SamplingParams(1, temperature=1.0, top_k=2),
        SamplingParams(1, temperature=1.0, top_p=0.9, logprobs=True),
    ):
        assert SamplingPlan.of([greedy, filtered]) == SamplingPlan(
            draws=True, filters=True, logprobs=filtered.logprobs
        )


def test_rows_written_in_place_are_padded_with_greedy_ones() -> None:
    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(8))
    params = [SamplingParams(1, temperature=1.2, top_k=9, top_p=0.9, min_p=0.01, seed=5), SamplingParams(1)]
    rows = SamplingRows.of((), torch.device("cpu"), pad_to=4)
    views = rows.first(3)
    rows.copy_(SamplingRows.of(params, torch.device("cpu"), pad_to=4))
    tokens = sample_rows(logits[:3], views, torch.tensor([7, 0, 0]), SamplingPlan.of(params)).tokens_R
    assert torch.equal(tokens[:2], sample(logits[:2], params, [7, 0]).tokens_R)
    assert int(tokens[2]) == int(logits[2].argmax())


@pytest.mark.parametrize("num_rows", [1, 3])
def test_repeated_rows_lie_in_memory_as_kernels_read_them(num_rows: int) -> None:
    rows = SamplingRows.of(
        [SamplingParams(1, temperature=0.5 + idx, seed=idx) for idx in range(num_rows)], torch.device("cpu")
    )
    repeated = rows.repeated(5)
    assert repeated.seeds_R.stride() == repeated.temperature_R.stride() == (1,)
    assert repeated.seeds_R.tolist() == [idx for idx in range(num_rows) for _ in range(5)]


def test_top_p_counts_probability_exactly() -> None:
    """Sixteen equal tokens: each is a sixteenth, whatever a float makes of the sum before it."""
    uniform = torch.zeros(16)
    for kept in range(1, 17):
        assert set(draws(uniform, 600, top_p=kept / 16).tolist()) == set(range(kept))


def kept_by_definition(
    logits_V: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    p = (logits_V.to(torch.float64) / temperature).softmax(0).tolist()
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    kept = set()
    total = 0.0
    for rank, token in enumerate(order):
        if rank and ((top_k and rank >= top_k) or total >= top_p):
            break
        if p[token] >= min_p * p[order[0]]:
            kept.add(token)
        total += p[token]
    return kept


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 1.0, 0.0),
        (3, 1.0, 0.0),
        (0, 0.6, 0.0),
        (0, 1.0, 0.2),
        (6, 0.8, 0.05),
        (1, 1.0, 0.0),
        (0, 1e-6, 0.0),
    ],
)
def test_filters_keep_what_their_definitions_say(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(24, generator=torch.Generator().manual_seed(7))
    kept = kept_by_definition(logits, temperature=1.5, top_k=top_k, top_p=top_p, min_p=min_p)
    drawn = draws(logits, 6_000, temperature=1.5, top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(drawn.tolist()) == kept


def test_equal_logits_under_top_k_keep_the_lowest_ids() -> None:
    assert set(draws(torch.zeros(10), 500, top_k=2).tolist()) == {0, 1}


def test_a_vanishing_temperature_is_greedy() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(9))
    cold = [SamplingParams(1, temperature=1e-30, seed=row) for row in range(6)]
    assert torch.equal(sample(logits, cold, range(6)).tokens_R, logits.argmax(dim=-1))


def test_logprobs_are_of_the_unfiltered_softmax() -> None:
    logits = torch.randn(2, 33, generator=torch.Generator().manual_seed(2))
    params = [SamplingParams(1, temperature=0.5, top_k=4, logprobs=True), SamplingParams(1)]
    choice = sample(logits, params, [0, 0])
    assert choice.logprobs_R is not None
    expected = logits.to(torch.float64).softmax(-1).log()[torch.arange(2), choice.tokens_R]
    torch.testing.assert_close(choice.logprobs_R.to(torch.float64), expected, rtol=1e-6, atol=1e-6)
    assert sample(logits, [SamplingParams(1)] * 2, [0, 0]).logprobs_R is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0.0},
        {"min_p": 1.0},
        {"seed": -1},
    ],
)
def test_parameters_out_of_range_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        SamplingParams(**{"max_tokens": 1, **wrong})  # type: ignore[arg-type]
