"""Accuracy against an independent double-precision computation, and its invariances."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from compress.errors import GateFailed, UsageError
from compress.validate.accuracy import Accuracy, Logits, kl_divergence, measure_accuracy, measure_pairs

VOCAB, WINDOWS, WINDOW = 211, 7, 150  # more positions than are scored at once, and not a multiple


def table_model(
    seed: int, *, noise: float = 0.0, scale: float = 3.0, dtype: torch.dtype = torch.float32
) -> Logits:
    """Next-token logits that depend on the token and on its position, so that a shifted or dropped position
    is noticed.
    """
    generator = torch.Generator().manual_seed(0)
    own = torch.Generator().manual_seed(seed)
    table_VV = torch.randn(VOCAB, VOCAB, generator=generator) * scale
    table_SV = torch.randn(WINDOW, VOCAB, generator=generator) * scale
    noise_VV = torch.randn(VOCAB, VOCAB, generator=own) * noise

    def logits(tokens_BS: Tensor) -> Tensor:
        return ((table_VV + noise_VV)[tokens_BS] + table_SV[: tokens_BS.shape[1]]).to(dtype)

    return logits


@pytest.fixture(name="tokens_NS", scope="module")
def fixture_tokens() -> Tensor:
    return torch.randint(VOCAB, (WINDOWS, WINDOW), generator=torch.Generator().manual_seed(9))


def test_models_scored_together_compare_as_two_do(tokens_NS: Tensor) -> None:
    models = [table_model(0), table_model(1, noise=0.1), table_model(2, noise=0.3)]
    pairs = ((0, 2), (0, 1), (1, 2))
    together = measure_pairs(models, pairs, tokens_NS, num_bytes=4321)
    assert together == [measure_accuracy(models[a], models[b], tokens_NS, num_bytes=4321) for a, b in pairs]


def test_agrees_with_double_precision_numpy(tokens_NS: Tensor) -> None:
    source = table_model(0)
    candidate = table_model(1, noise=0.3)
    accuracy = measure_accuracy(source, candidate, tokens_NS, num_bytes=4321)

    def log_softmax(model: Logits) -> np.ndarray:
        x = model(tokens_NS).double().numpy()[:, :-1]
        return (
            x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
        )

    log_p = log_softmax(source)
    log_q = log_softmax(candidate)
    target = tokens_NS[:, 1:].numpy()[..., None]
    nll_p = -np.take_along_axis(log_p, target, -1)[..., 0]
    nll_q = -np.take_along_axis(log_q, target, -1)[..., 0]
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    # Each log-probability is rounded at its own size (about 20 here); means of many average the rounding,
    # they do not add to it.
    tolerance = 8 * float(np.finfo(np.float32).eps) * float(np.abs(log_p).max())
    assert accuracy.num_tokens == kl.size == WINDOWS * (WINDOW - 1)
    assert accuracy.ppl_source.value == pytest.approx(np.exp(nll_p.mean()), rel=tolerance)
    assert accuracy.ppl_candidate.value == pytest.approx(np.exp(nll_q.mean()), rel=tolerance)
    assert accuracy.ppl_ratio.value == pytest.approx(np.exp(nll_q.mean() - nll_p.mean()), rel=2 * tolerance)
    assert accuracy.bits_per_byte.value == pytest.approx(nll_q.sum() / math.log(2) / 4321, rel=tolerance)
    assert accuracy.kl_mean.value == pytest.approx(kl.mean(), abs=tolerance)
    for estimate, probability in ((accuracy.kl_p50, 0.5), (accuracy.kl_p99, 0.99), (accuracy.kl_p999, 0.999)):
        assert estimate.value == pytest.approx(np.quantile(kl, probability), abs=tolerance)
    assert accuracy.kl_max == pytest.approx(kl.max(), abs=tolerance)
    assert accuracy.top1.value == pytest.approx((log_p.argmax(-1) == log_q.argmax(-1)).mean(), rel=1e-12)
    differences = (nll_q - nll_p).mean(axis=1)
    paired = (
        2.446911851 * differences.std(ddof=1) / math.sqrt(WINDOWS)
    )  # Student's t, 6 degrees of freedom, two-sided 95 %
    assert math.log(accuracy.ppl_ratio.upper / accuracy.ppl_ratio.value) == pytest.approx(paired, rel=1e-4)


def test_identical_models_differ_by_nothing(tokens_NS: Tensor) -> None:
    accuracy = measure_accuracy(
        table_model(0, dtype=torch.bfloat16), table_model(0, dtype=torch.bfloat16), tokens_NS, num_bytes=1
    )
    assert accuracy.kl_max == accuracy.kl_mean.upper == 0.0
    assert accuracy.top1.lower == accuracy.ppl_ratio.value == accuracy.ppl_ratio.upper == 1.0
    assert accuracy.ppl_candidate == accuracy.ppl_source


def test_small_divergences_keep_their_digits() -> None:
    """KL of about 1e-9, far below what fp32 resolves when the plain sum of p (log p - log q) is taken."""
    generator = torch.Generator().manual_seed(3)
    p_TV = torch.randn(16, 4096, generator=generator, dtype=torch.float64)
    q_TV = p_TV + 5e-5 * torch.randn(16, 4096, generator=generator, dtype=torch.float64)
    log_p_TV = p_TV.log_softmax(-1)
    log_q_TV = q_TV.log_softmax(-1)
    exact_T = (log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1)
    fp32_T = kl_divergence(log_p_TV.float(), log_q_TV.float()).double()
    plain_T = (log_p_TV.float().exp() * (log_p_TV.float() - log_q_TV.float())).sum(-1).double()
    assert float(exact_T.max()) < 2e-9
    assert ((fp32_T - exact_T).abs() / exact_T).max() < 0.02
    assert ((plain_T - exact_T).abs() / exact_T).max() > 0.5


def test_adding_a_constant_to_the_logits_changes_nothing_that_matters(tokens_NS: Tensor) -> None:
    source = table_model(0)
    candidate = table_model(1, noise=0.3)
    plain = measure_accuracy(source, candidate, tokens_NS, num_bytes=99)
    shifted = measure_accuracy(
        lambda tokens: source(tokens) + 64, lambda tokens: candidate(tokens) - 32, tokens_NS, num_bytes=99
    )
    tolerance = 16 * 64 * float(np.finfo(np.float32).eps)
    assert shifted.kl_mean.value == pytest.approx(plain.kl_mean.value, abs=tolerance)
    assert shifted.kl_max == pytest.approx(plain.kl_max, abs=tolerance)
    assert shifted.ppl_ratio.value == pytest.approx(plain.ppl_ratio.value, rel=tolerance)
    assert shifted.top1 == plain.top1


@pytest.mark.parametrize("batch_size", [1, 2, 3, WINDOWS, 50])
def test_the_same_bits_whatever_the_batch_size(tokens_NS: Tensor, batch_size: int) -> None:
    source = table_model(0, dtype=torch.bfloat16)
    candidate = table_model(1, noise=0.3, dtype=torch.bfloat16)
    expected = measure_accuracy(source, candidate, tokens_NS, num_bytes=99, batch_size=4)
    assert measure_accuracy(source, candidate, tokens_NS, num_bytes=99, batch_size=batch_size) == expected


def test_words_that_both_models_exclude_add_nothing_and_one_excluded_by_the_source_adds_its_mass() -> None:
    p_TV = torch.tensor([[0.25, 0.75, 0.0, 0.0]])
    q_TV = torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    expected = 0.25 * math.log(0.5) + 0.75 * math.log(3.0)
    assert kl_divergence(p_TV.log(), q_TV.log()).item() == pytest.approx(expected, rel=1e-6)


def test_a_certain_model_against_its_opposite_does_not_overflow() -> None:
    p_TV = torch.tensor([[0.0, -300.0]]).log_softmax(-1)
    q_TV = torch.tensor([[-90.0, 0.0]]).log_softmax(-1)
    assert kl_divergence(p_TV, q_TV).item() == pytest.approx(90.0)
    assert kl_divergence(q_TV, p_TV).item() == pytest.approx(300.0)


def test_the_histogram_counts_every_token(tokens_NS: Tensor) -> None:
    far = measure_accuracy(
        table_model(0), lambda tokens: -40 * table_model(0)(tokens), tokens_NS, num_bytes=1
    )
    assert sum(far.kl_bin_counts) == far.num_tokens
    assert far.kl_max > far.kl_bin_edges[-1]
    assert len(far.kl_bin_edges) == len(far.kl_bin_counts) + 1


def test_a_candidate_of_nan_fails_as_a_gate_would(tokens_NS: Tensor) -> None:
    def broken(tokens_BS: Tensor) -> Tensor:
        logits_BSV = table_model(0)(tokens_BS).clone()
        logits_BSV[-1, 5, 7] = math.nan
        return logits_BSV

    with pytest.raises(GateFailed, match="window 3"):
        measure_accuracy(table_model(0), broken, tokens_NS, num_bytes=1, batch_size=4)
    with pytest.raises(UsageError, match="source"):
        measure_accuracy(broken, table_model(0), tokens_NS, num_bytes=1)


def test_models_of_different_vocabularies_are_not_compared(tokens_NS: Tensor) -> None:
    with pytest.raises(UsageError, match="vocabulary"):
        measure_accuracy(
            table_model(0), lambda tokens: table_model(0)(tokens)[..., :-1], tokens_NS, num_bytes=1
        )


def test_metrics_are_the_fields_of_the_same_name(tokens_NS: Tensor) -> None:
    accuracy: Accuracy = measure_accuracy(table_model(0), table_model(1, noise=0.1), tokens_NS, num_bytes=1)
    fields = {field.name for field in dataclasses.fields(accuracy)}
    assert set(accuracy.metrics()) <= fields
    assert accuracy.metrics()["kl_max"].upper == accuracy.kl_max
