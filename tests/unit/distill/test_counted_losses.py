"""Losses and measurements that count some tokens only, against logits written out; whatever the size of a
micro-batch."""

from functools import partial

import pytest
import torch

from compress.distill.draft_head import DraftHeadObjective, Target
from compress.distill.losses import Divergence
from compress.distill.objective import Objective, Teacher, measure
from compress.distill.train import TrainConfig, Training, Windows
from compress.models.eagle3 import eagle3_facts
from compress.models.fresh_eagle3 import fresh_eagle3
from tests.support.tiny_decoder import tiny_arch, tiny_decoder, tiny_source

CPU = torch.device("cpu")
ARCH = tiny_arch()
TOKENS = torch.randint(
    ARCH.vocab_size, (8, 13), generator=torch.Generator().manual_seed(5), dtype=torch.int32
)
COUNTED = torch.rand(TOKENS.shape, generator=torch.Generator().manual_seed(6)) < 0.4


def kl_of(student, teacher, tokens):
    log_q, log_p = (each(tokens[:, :-1]).double().log_softmax(-1) for each in (student, teacher))
    return (log_p.exp() * (log_p - log_q)).sum(-1), log_q, log_p


def test_the_loss_and_its_gradient_are_the_mean_over_the_tokens_that_count():
    student = tiny_decoder(ARCH, seed=1).requires_grad_(True)
    teacher = tiny_decoder(ARCH, seed=2)
    windows = Windows(TOKENS, batch_size=4, seed=0)
    tokens, weights = windows.weighted(1, COUNTED)
    loss = Objective(Divergence(), Teacher(teacher, device=CPU), weighted=True)(student, tokens, weights)
    kl, *_ = kl_of(student, teacher, tokens)
    expected = kl[COUNTED[windows.chosen(1)][:, 1:]].mean()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    parameters = list(student.parameters())
    ours = torch.autograd.grad(loss, parameters)
    for got, wanted in zip(ours, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-6)


def test_micro_batches_with_few_and_many_counted_tokens_make_one_mean():
    after = []
    for micro_batch_size in (1, 2, 4):
        student = tiny_decoder(ARCH, seed=1).requires_grad_(True)
        config = TrainConfig(
            num_steps=1, batch_size=4, micro_batch_size=micro_batch_size, peak_lr=1e-2, log_every=1
        )
        batch_of = partial(Windows(TOKENS, batch_size=4, seed=0).weighted, counted_NS=COUNTED)
        objective = Objective(Divergence(), Teacher(tiny_decoder(ARCH, seed=2), device=CPU), weighted=True)
        (row,) = Training(student, objective, batch_of, config, device=CPU).rows()
        after.append((row.loss, row.grad_norm))
    assert after[1] == pytest.approx(after[0], rel=1e-3)
    assert after[2] == pytest.approx(after[0], rel=1e-3)


def test_a_batch_in_which_nothing_counts_has_no_loss():
    student = tiny_decoder(ARCH, seed=1).requires_grad_(True)
    batch = Windows(TOKENS, batch_size=4, seed=0).weighted(0, torch.zeros_like(COUNTED))
    teacher = Teacher(tiny_decoder(ARCH, seed=2), device=CPU)
    assert float(Objective(Divergence(), teacher, weighted=True)(student, *batch).detach()) == 0.0


def test_held_out_sums_are_those_of_the_tokens_that_count():
    student, teacher = (tiny_decoder(ARCH, seed=seed) for seed in (1, 2))
    found = measure(
        student, Teacher(teacher, device=CPU), TOKENS, CPU, compute_dtype=torch.float32, counted_NS=COUNTED
    )
    tokens = TOKENS.to(torch.int64)
    kl, log_q, log_p = kl_of(student, teacher, tokens)
    counts = COUNTED[:, 1:]
    assert found.num_tokens == int(counts.sum())
    assert found.kl_mean == pytest.approx(float(kl[counts].mean()), rel=1e-4)
    nll = -log_q.gather(-1, tokens[:, 1:, None])[..., 0]
    assert found.student_nll == pytest.approx(float(nll[counts].sum()), rel=1e-5)
    kept = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
    assert found.acceptance == pytest.approx(float(kept[counts].mean()), rel=1e-5)
    everything = measure(student, Teacher(teacher, device=CPU), TOKENS, CPU, compute_dtype=torch.float32)
    assert found.acceptance_length == everything.acceptance_length
    whole = torch.ones_like(COUNTED)
    same = measure(
        student, Teacher(teacher, device=CPU), TOKENS, CPU, compute_dtype=torch.float32, counted_NS=whole
    )
    assert same == everything


def test_an_eagle3_head_learns_from_the_drafted_tokens_that_count():
    decoder = tiny_decoder(ARCH, seed=2)
    words = torch.arange(ARCH.vocab_size)
    facts = eagle3_facts(ARCH, draft_vocab_size=len(words))
    head = fresh_eagle3(facts, tiny_source(ARCH), words, generator=torch.Generator().manual_seed(1))
    objective = DraftHeadObjective(Divergence(), Target(decoder, facts.layer_ids, words, device=CPU), 3)
    tokens = TOKENS.to(torch.int64)
    whole = objective(head, tokens)
    assert float(objective(head, tokens, torch.ones(tokens.shape))) == pytest.approx(float(whole), rel=1e-6)
    parts = []
    for position in range(tokens.shape[1]):
        one = torch.zeros(tokens.shape)
        one[:, position] = 1
        parts.append(float(objective(head, tokens, one)))
    assert parts[:2] == [0.0, 0.0]  # a head drafts from the second token on
    assert all(each > 0 for each in parts[2:])
    assert sum(parts) == pytest.approx(float(whole), rel=1e-4)
