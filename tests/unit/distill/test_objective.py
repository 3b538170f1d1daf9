"""The objective against logits written out, what is kept of a teacher, and a training state that goes on with
the same bits.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.artifact.tensors import load_tensors, save_tensors
from compress.context import OneRank
from compress.distill.acceptance import K, steps_over
from compress.distill.kept import KeptLogits
from compress.distill.losses import Divergence
from compress.distill.objective import Objective, Teacher, measure
from compress.distill.train import TrainConfig, Training, Windows
from compress.errors import UsageError
from tests.support.tiny_decoder import tiny_arch, tiny_decoder

CPU = torch.device("cpu")
ARCH = tiny_arch()
WINDOWS = torch.randint(
    ARCH.vocab_size, (70, 13), generator=torch.Generator().manual_seed(5), dtype=torch.int32
)


LOGGED: list[str] = []


def kept(place: Path, **changes: Any) -> KeptLogits:
    facts = {"teacher": "sha256:t", "tokens": "sha256:w", "num_kept": 60, "temperature": 1.0, **changes}
    return KeptLogits(place, WINDOWS, log=LOGGED.append, **facts)


def walked(kept_NS: torch.Tensor, k: int) -> float:
    """Tokens of a step by a walk through every window, all ways it may go followed one after the other."""
    emitted = steps = 0.0
    for kept in kept_NS.tolist():
        waiting = [(0, 1.0)]
        while waiting:
            start, chance = waiting.pop()
            if start + k > len(kept):
                continue
            steps += chance
            for count in range(k + 1):
                rejected = 1.0 if count == k else 1 - kept[start + count]
                emitted += chance * rejected * (count + 1)
                waiting.append((start + count + 1, chance * rejected))
                chance *= 1.0 if count == k else kept[start + count]
    return emitted / steps


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
def test_where_every_token_is_kept_as_often_a_step_has_the_length_of_the_formula(rate: float) -> None:
    emitted, steps = steps_over(torch.full((2, 400), rate, dtype=torch.float64), 4)
    assert float(emitted / steps) == pytest.approx(sum(rate**idx for idx in range(5)), rel=1e-9)


def test_measured_is_what_the_logits_say() -> None:
    student = tiny_decoder(ARCH, seed=1)
    teacher = tiny_decoder(ARCH, seed=2)
    found = measure(student, Teacher(teacher, device=CPU), WINDOWS, CPU, compute_dtype=torch.float32)
    tokens = WINDOWS.to(torch.int64)
    log_q, log_p = (each(tokens[:, :-1]).double().log_softmax(-1) for each in (student, teacher))
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    nll = -log_q.gather(-1, tokens[:, 1:, None]).sum()
    assert found.kl_mean == pytest.approx(float(kl), rel=1e-4)
    kept = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
    assert found.acceptance == pytest.approx(float(kept.mean()), rel=1e-5)
    assert found.top1 == pytest.approx(float((log_p.argmax(-1) == log_q.argmax(-1)).double().mean()))
    assert found.acceptance_length == pytest.approx(walked(kept, K), rel=1e-5)
    assert found.bits_per_byte(1000)[0] == pytest.approx(float(nll) / math.log(2) / 1000, rel=1e-5)
    objective = Objective(Divergence(), Teacher(teacher, device=CPU))
    assert float(objective(student, tokens)) == pytest.approx(float(kl), rel=1e-4)


def test_kept_logits_are_nearly_the_teacher_and_are_filled_where_they_are_missing(tmp_path: Path) -> None:
    teacher = Teacher(tiny_decoder(ARCH, seed=2), device=CPU)
    student = tiny_decoder(ARCH, seed=1)
    logits = kept(tmp_path)
    calls: list[int] = []
    logits.fill(teacher, OneRank(), calls.append, device=CPU)
    assert logits.num_shards == 2
    assert calls == [0, 1]
    chosen = [3, 69, 64, 0]
    tokens = WINDOWS[chosen].to(torch.int64)
    rows = logits.rows(chosen)
    total = torch.cat((rows.log_p_TK, rows.log_tail_T.unsqueeze(-1)), dim=-1).logsumexp(-1)
    assert total.abs().max() < 1e-5
    divergence = Divergence("reverse_kl")
    whole = float(Objective(divergence, teacher)(student, tokens))
    assert float(Objective(divergence, None)(student, tokens, *rows)) == pytest.approx(whole, rel=0.01)
    (logits.directory / "00001.safetensors").unlink()
    again = kept(tmp_path)
    assert again.missing() == [1]
    again.fill(teacher, OneRank(), calls.append, device=CPU)
    assert all(torch.equal(one, other) for one, other in zip(again.rows(chosen), rows, strict=True))


@pytest.mark.parametrize(
    "changes", [{"teacher": "sha256:u"}, {"tokens": "sha256:x"}, {"num_kept": 5}, {"temperature": 2.0}]
)
def test_what_is_kept_has_a_name_that_says_what_it_is(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert kept(tmp_path).directory != kept(tmp_path, **changes).directory


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.one_in(8)
def test_a_restored_training_goes_on_with_the_same_bits(tmp_path: Path, optimizer: Any) -> None:
    def training() -> Training:
        student = tiny_decoder(ARCH, seed=1).requires_grad_(True)
        teacher = Teacher(tiny_decoder(ARCH, seed=2), device=CPU)
        config = TrainConfig(20, 8, 4, 1e-2, optimizer, compute_dtype=torch.float32, log_every=4)
        return Training(
            student,
            Objective(Divergence(), teacher),
            Windows(WINDOWS, batch_size=8, seed=0).batch,
            config,
            device=CPU,
        )

    def facts(rows: list[Any]) -> list[tuple[Any, ...]]:
        return [(row.step, row.num_tokens, row.loss, row.grad_norm, row.learning_rate) for row in rows]

    undisturbed = training()
    cut = training()
    resumed = training()
    whole = list(undisturbed.rows())
    assert whole[-1].loss < 0.7 * whole[0].loss
    first = [row for _, row in zip(range(2), cut.rows(), strict=False)]
    save_tensors(tmp_path / "state.safetensors", cut.tensors())
    resumed.restore_(load_tensors(tmp_path / "state.safetensors"))
    assert facts(first) + facts(list(resumed.rows())) == facts(whole)
    assert all(torch.equal(value, undisturbed.tensors()[name]) for name, value in resumed.tensors().items())


def test_every_epoch_shows_every_full_batch_of_windows_in_another_order() -> None:
    windows = Windows(WINDOWS, batch_size=8, seed=0)
    epochs = [
        [idx for step in range(8 * epoch, 8 * epoch + 8) for idx in windows.chosen(step)]
        for epoch in range(2)
    ]
    assert all(len(set(epoch)) == 64 for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert torch.equal(windows.batch(3), WINDOWS[windows.chosen(3)].to(torch.int64))
    with pytest.raises(UsageError, match="70 windows of text do not fill one batch of 71"):
        Windows(WINDOWS, batch_size=71, seed=0)
