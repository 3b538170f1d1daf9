"""Divergences against the textbook written with autograd in float64, the laws of divergences, and slices
against the whole.
"""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.distill import head as head_module
from compress.distill.head import mean_divergence, slices
from compress.distill.losses import Divergence, Kind, TopK, divergence_rows, keep_top
from compress.errors import UsageError

KINDS: tuple[Kind, ...] = get_args(Kind)
NUM_TOKENS = 7
VOCAB = 23


def logits(seed: int, spread: float = 3.0) -> Tensor:
    return spread * torch.randn(NUM_TOKENS, VOCAB, generator=torch.Generator().manual_seed(seed))


def labels() -> Tensor:
    return torch.randint(VOCAB, (NUM_TOKENS,), generator=torch.Generator().manual_seed(9))


def textbook(p: Tensor, q: Tensor, kind: Kind) -> Tensor:
    """Sums over outcomes, as the papers write them."""
    m = (p + q) / 2
    if kind == "forward_kl":
        return (p * (p / q).log()).sum(-1)
    if kind == "reverse_kl":
        return (q * (q / p).log()).sum(-1)
    if kind in ("tv", "lk"):
        distance = 0.5 * (p - q).abs().sum(-1)
        return distance if kind == "tv" else -(1 - distance).log()
    return 0.5 * (p * (p / m).log()).sum(-1) + 0.5 * (q * (q / m).log()).sum(-1)


def expected(
    student: Tensor, teacher: Tensor, loss: Divergence, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Loss and gradient in float64 through autograd; `kept` lists the tokens that are told apart."""
    z = student.double().requires_grad_()
    p = (teacher.double() / loss.temperature).softmax(-1)
    q = (z / loss.temperature).softmax(-1)
    if kept is not None:
        p, q = (
            torch.cat((each.gather(-1, kept), 1 - each.gather(-1, kept).sum(-1, keepdim=True)), dim=-1)
            for each in (p, q)
        )
    hard = torch.nn.functional.cross_entropy(z, labels(), reduction="none")
    total = (1 - loss.hard_frac) * loss.temperature**2 * textbook(p, q, loss.kind) + loss.hard_frac * hard
    (gradient,) = torch.autograd.grad(total.sum(), z)
    return total.detach(), gradient


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("temperature", "hard_frac"), [(1.0, 0.0), (2.5, 0.0), (0.7, 0.3)])
@pytest.mark.parametrize("num_kept", [None, 1, 5])
def test_loss_and_gradient_are_those_of_the_textbook(
    kind: Kind, temperature: float, hard_frac: float, num_kept: int | None
) -> None:
    loss = Divergence(kind, temperature, hard_frac)
    student = logits(0)
    teacher = logits(1)
    kept = None if num_kept is None else keep_top(teacher, num_kept, temperature)
    got = divergence_rows(student, teacher if kept is None else kept, labels(), loss)
    want = expected(student, teacher, loss, None if kept is None else kept.ids_TK)
    for one, other in zip(got, want, strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 1000), spread=st.floats(0.1, 30), num_kept=st.integers(1, VOCAB - 1))
@settings(deadline=None, max_examples=30)
def test_divergences_are_divergences_and_buckets_never_say_more(
    kind: Kind, seed: int, spread: float, num_kept: int
) -> None:
    student = logits(seed, spread)
    teacher = logits(seed + 1, spread)
    loss = Divergence(kind)
    full, gradient = divergence_rows(student, teacher, labels(), loss)
    bucketed, bucketed_gradient = divergence_rows(student, keep_top(teacher, num_kept), labels(), loss)
    slack = 1e-4 * (1 + full)
    assert torch.isfinite(gradient).all()
    assert torch.isfinite(bucketed_gradient).all()
    assert (bucketed >= -1e-5).all()
    assert (bucketed <= full + slack).all()
    if kind == "js":
        assert (full <= math.log(2) + 1e-5).all()
    for same in (teacher, keep_top(teacher, num_kept)):
        zero, flat = divergence_rows(teacher, same, labels(), loss)
        assert zero.abs().max() < 1e-5
        assert flat.abs().max() < 1e-5


def test_a_tail_that_subtraction_would_lose_is_kept() -> None:
    certain = torch.zeros(1, VOCAB)
    certain[0, 3] = 40.0
    top = keep_top(certain, 1)
    assert float(top.log_tail_T) == pytest.approx(math.log((VOCAB - 1) * math.exp(-40.0)), rel=1e-5)
    assert top.ids_TK.tolist() == [[3]]


@pytest.mark.parametrize("kind", ["tv", "lk"])
def test_where_nothing_is_kept_loss_and_gradient_are_numbers(kind: Kind) -> None:
    student, teacher = torch.zeros(2, 1, VOCAB)
    student[0, 3] = 500.0
    teacher[0, 5] = 500.0
    loss_T, gradient_TV = divergence_rows(student, teacher, labels()[:1], Divergence(kind))
    assert torch.isfinite(loss_T).all()
    assert float(loss_T) >= 1
    assert torch.isfinite(gradient_TV).all()


def test_a_vocabulary_without_a_tail_is_refused() -> None:
    with pytest.raises(UsageError, match="leave out top_k"):
        keep_top(logits(0), VOCAB)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("top_k", [None, 4])
def test_slices_give_loss_and_gradients_of_the_whole(
    top_k: int | None, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(2)
    loss = Divergence("forward_kl", 1.5, 0.2)
    hidden = torch.randn(NUM_TOKENS, 6, generator=generator)
    head = torch.randn(VOCAB, 6, generator=generator)
    bias = torch.randn(VOCAB, generator=generator) * has_bias
    teacher = logits(1)

    def targets(part: slice) -> Tensor | TopK:
        return teacher[part] if top_k is None else keep_top(teacher[part], top_k, loss.temperature)

    results = []
    for values in (1 << 22, 2 * VOCAB):  # one slice; slices of two tokens and one
        monkeypatch.setattr(head_module, "SLICE_VALUES", {"cpu": values})
        h = hidden.clone().requires_grad_()
        w = head.clone().requires_grad_()
        b = bias.clone().requires_grad_()
        mean = mean_divergence(h, w, targets, labels(), loss, bias_V=b if has_bias else None)
        (3 * mean).backward()
        assert h.grad is not None
        assert w.grad is not None
        assert (b.grad is not None) == has_bias
        results.append((mean.detach(), h.grad, w.grad, torch.zeros(VOCAB) if b.grad is None else b.grad))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    z = hidden.double() @ head.double().T + bias.double()
    kept = None if top_k is None else keep_top(teacher, top_k, loss.temperature).ids_TK
    want, gradient = expected(z, teacher, loss, kept)
    assert float(results[0][0]) == pytest.approx(float(want.mean()), rel=1e-5)
    assert torch.allclose(
        results[0][1].double(), 3 * gradient @ head.double() / NUM_TOKENS, rtol=1e-3, atol=1e-5
    )
    assert torch.allclose(
        results[0][2].double(), 3 * gradient.T @ hidden.double() / NUM_TOKENS, rtol=1e-3, atol=1e-5
    )


@given(num_tokens=st.integers(1, 5000), vocab_size=st.integers(2, 1 << 23))
def test_slices_cover_every_token_once_and_stay_small(num_tokens: int, vocab_size: int) -> None:
    parts = slices(num_tokens, vocab_size, torch.device("cpu"))
    assert [idx for part in parts for idx in range(part.start, part.stop)] == list(range(num_tokens))
    assert all((part.stop - part.start) * vocab_size <= max(1 << 22, vocab_size) for part in parts)
    assert len({part.stop - part.start for part in parts[:-1]}) <= 1
