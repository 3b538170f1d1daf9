"""Scores of a source that are kept: exact ones give the numbers of both models side by side; the likeliest
tokens bound KL from below and estimate it without bias; nothing stale is read."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.errors import GateFailed, StorageError, UsageError
from compress.validate.accuracy import measure_accuracy, score_window
from compress.validate.kept_scores import KeptScores, compare_kept, kept_bytes, likeliest, score_top_k
from tests.unit.validate.test_accuracy import VOCAB, WINDOW, WINDOWS, table_model

TOKENS = torch.randint(VOCAB, (WINDOWS, WINDOW), generator=torch.Generator().manual_seed(9))
IDENTITY = {"source": "sha256:s", "tokens": "sha256:t", "dtype": "float32", "machine": "here"}
SOURCE = table_model(0)
CANDIDATE = table_model(1, noise=0.4)


def keep(place: Path, top_k: int | None = None, model=SOURCE, batch_size: int = 3, **changes) -> KeptScores:
    kept = KeptScores(
        place,
        TOKENS,
        identity={**IDENTITY, **changes},
        batch_size=batch_size,
        top_k=top_k,
        log=lambda text: None,
    )
    if not kept.are_whole():
        kept.fill(model(batch) for batch in TOKENS.split(batch_size))
    return kept


def compare(*kept: KeptScores, candidate=CANDIDATE, batch_size: int = 3):
    logits = (candidate(batch) for batch in TOKENS.split(batch_size))
    return compare_kept(kept, logits, TOKENS, num_bytes=4321, batch_size=batch_size)


def test_exact_scores_give_the_numbers_of_both_side_by_side(tmp_path):
    expected = measure_accuracy(SOURCE, CANDIDATE, TOKENS, num_bytes=4321)
    ((lower, whole),) = compare(keep(tmp_path))
    assert lower == whole == expected


def test_several_sources_are_compared_at_once(tmp_path):
    other = table_model(2, noise=0.2)
    pairs = compare(keep(tmp_path), keep(tmp_path, model=other, source="sha256:o"))
    expected = [measure_accuracy(each, CANDIDATE, TOKENS, num_bytes=4321) for each in (SOURCE, other)]
    assert [whole for _, whole in pairs] == expected


@pytest.mark.parametrize("top_k", [1, 5, 60])
def test_the_likeliest_tokens_estimate_kl_and_leave_the_rest_exact(tmp_path, top_k):
    expected = measure_accuracy(SOURCE, CANDIDATE, TOKENS, num_bytes=4321)
    ((lower, whole),) = compare(keep(tmp_path, top_k))
    assert lower.kl_mean.value <= expected.kl_mean.value
    assert whole.kl_mean.lower <= expected.kl_mean.value <= whole.kl_mean.upper
    for exact in ("ppl_source", "ppl_candidate", "ppl_ratio", "bits_per_byte", "top1"):
        assert getattr(lower, exact) == getattr(whole, exact) == getattr(expected, exact)


def rows(seed: int, scale: float) -> Tensor:
    return scale * torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
@pytest.mark.parametrize("top_k", [1, 8, 100, VOCAB - 1])
def test_the_lower_bound_holds_at_every_position_and_the_estimate_has_no_bias(scale, top_k):
    source_SV = rows(0, scale)
    candidate_SV = source_SV + rows(1, 0.5)
    tokens_S = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(2))
    exact = score_window(source_SV, candidate_SV, tokens_S)
    drawings = []
    for seed in range(40):
        kept = likeliest(source_SV, tokens_S, top_k, torch.Generator().manual_seed(seed))
        lower, whole = score_top_k(kept, candidate_SV[:-1], tokens_S)
        drawings.append(whole.kl)
        slack = 1e-5 * (1 + exact.kl)
        assert bool((lower.kl <= exact.kl + slack).all())
        assert bool((lower.kl <= whole.kl + slack).all())
        assert torch.equal(lower.same_top1, exact.same_top1)
        assert torch.equal(lower.nll_source, exact.nll_source)
    drawn = torch.stack(drawings).double()
    deviation = drawn.mean(0) - exact.kl
    standard_error = drawn.std(0) / len(drawn) ** 0.5
    assert bool((deviation.abs() <= 6 * standard_error + 1e-5 * (1 + exact.kl)).all())
    if top_k == VOCAB - 1:  # the tail is one token
        torch.testing.assert_close(drawn[0].float(), exact.kl, rtol=1e-4, atol=1e-5)


def test_a_tail_without_mass_adds_nothing():
    source_SV = torch.full((3, 20), -300.0)
    source_SV[:, :2] = 0.0
    tokens_S = torch.tensor([0, 1, 0])
    kept = likeliest(source_SV, tokens_S, 2, torch.Generator().manual_seed(0))
    lower, whole = score_top_k(kept, torch.zeros(2, 20), tokens_S)
    exact = score_window(source_SV, torch.zeros(3, 20), tokens_S)
    torch.testing.assert_close(whole.kl, exact.kl)
    assert torch.equal(lower.kl, whole.kl)


def test_scores_of_anything_else_are_never_read(tmp_path):
    names = {
        keep(tmp_path).directory,
        keep(tmp_path, 5).directory,
        keep(tmp_path, batch_size=2).directory,
        *(keep(tmp_path, **{key: "other"}).directory for key in IDENTITY),
    }
    assert len(names) == 3 + len(IDENTITY)


def test_scores_on_disk_are_used_and_damaged_ones_are_made_again(tmp_path):
    kept = keep(tmp_path)
    files = sorted(kept.directory.iterdir())
    assert len(files) == kept.num_batches == 3
    before = [file.stat().st_mtime_ns for file in files]
    assert keep(tmp_path, model=None).are_whole()  # no source is asked
    assert [file.stat().st_mtime_ns for file in files] == before
    data = bytearray(files[1].read_bytes())
    data[-3] ^= 1
    files[1].write_bytes(data)
    with pytest.raises(StorageError):
        compare(kept)
    assert not kept.are_whole()
    ((_, whole),) = compare(keep(tmp_path))
    assert whole == measure_accuracy(SOURCE, CANDIDATE, TOKENS, num_bytes=4321)


@pytest.mark.parametrize("top_k", [None, 7])
def test_the_planned_bytes_are_those_on_disk(tmp_path, top_k):
    kept = keep(tmp_path, top_k)
    planned = kept_bytes(WINDOWS, WINDOW, VOCAB, top_k)
    assert planned <= kept.num_bytes() <= planned + 1024 * kept.num_batches


def test_what_cannot_be_compared_is_refused(tmp_path):
    with pytest.raises(UsageError, match="leave out top_k"):
        keep(tmp_path, VOCAB)
    broken = lambda tokens: SOURCE(tokens) * float("nan")  # noqa: E731
    with pytest.raises(UsageError, match="not finite"):
        keep(tmp_path, model=broken)
    with pytest.raises(GateFailed, match="window 0"):
        compare(keep(tmp_path), candidate=broken)
    with pytest.raises(UsageError, match="share one vocabulary"):
        compare(keep(tmp_path), candidate=lambda tokens: SOURCE(tokens)[..., 1:])
