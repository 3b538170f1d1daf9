"""Scores of a source that are kept: exact ones give the numbers of both models side by side; the likeliest
tokens bound KL on both sides; nothing stale is read."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.errors import GateFailed, StorageError, UsageError
from compress.validate.accuracy import measure_accuracy, score_window
from compress.validate.kept_scores import KeptScores, _likeliest, _score_top_k, compare_kept, kept_bytes
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
    ((lower, upper),) = compare(keep(tmp_path))
    assert lower == upper == expected


def test_several_sources_are_compared_at_once(tmp_path):
    other = table_model(2, noise=0.2)
    pairs = compare(keep(tmp_path), keep(tmp_path, model=other, source="sha256:o"))
    expected = [measure_accuracy(each, CANDIDATE, TOKENS, num_bytes=4321) for each in (SOURCE, other)]
    assert [upper for _, upper in pairs] == expected


@pytest.mark.parametrize("top_k", [1, 5, 60])
def test_the_likeliest_tokens_bound_kl_and_leave_the_rest_exact(tmp_path, top_k):
    expected = measure_accuracy(SOURCE, CANDIDATE, TOKENS, num_bytes=4321)
    ((lower, upper),) = compare(keep(tmp_path, top_k))
    assert lower.kl_mean.value <= expected.kl_mean.value <= upper.kl_mean.value
    for exact in ("ppl_source", "ppl_candidate", "ppl_ratio", "bits_per_byte", "top1"):
        assert getattr(lower, exact) == getattr(upper, exact) == getattr(expected, exact)


def rows(seed: int, scale: float) -> Tensor:
    return scale * torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
@pytest.mark.parametrize("top_k", [1, 8, 100, VOCAB - 1])
def test_the_bounds_hold_at_every_position(scale, top_k):
    source_SV = rows(0, scale)
    candidate_SV = source_SV + rows(1, 0.5)
    tokens_S = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(2))
    exact = score_window(source_SV, candidate_SV, tokens_S)
    lower, upper = _score_top_k(_likeliest(source_SV, tokens_S, top_k), candidate_SV[:-1], tokens_S)
    slack = 1e-5 * (1 + exact.kl)
    assert bool((lower.kl <= exact.kl + slack).all())
    assert bool((exact.kl <= upper.kl + slack).all())
    assert torch.equal(lower.same_top1, exact.same_top1)
    if top_k == VOCAB - 1:  # the tail is one token, whose probability is known
        torch.testing.assert_close(lower.kl, upper.kl, rtol=1e-4, atol=1e-5)


def test_the_upper_bound_is_reached_by_the_worst_source_that_fits():
    """A source whose tail lies where the candidate sees least is as far away as the bound says."""
    candidate_V = torch.randn(20, generator=torch.Generator().manual_seed(0)).double()
    log_q_V = candidate_V.log_softmax(-1)
    order = log_q_V.argsort()
    p_V = torch.zeros(20, dtype=torch.float64)
    p_V[order[-4:]] = torch.tensor([0.15, 0.15, 0.2, 0.2], dtype=torch.float64)
    p_V[order[:2]] = 0.15  # as likely as the least likely kept token: the tail of 0.3 in the worst place
    exact = float((p_V[p_V > 0] * (p_V[p_V > 0].log() - log_q_V[p_V > 0])).sum())
    source_SV = p_V.log().clamp(min=-200).float().expand(2, -1)
    source_SV = source_SV + 0.0
    source_SV[:, order[-4:]] += 1e-4  # so that the four are the likeliest
    _, upper = _score_top_k(
        _likeliest(source_SV, torch.tensor([0, 1]), 4),
        candidate_V.float().expand(1, -1),
        torch.tensor([0, 1]),
    )
    assert float(upper.kl[0]) == pytest.approx(exact, rel=1e-3)


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
    ((_, upper),) = compare(keep(tmp_path))
    assert upper == measure_accuracy(SOURCE, CANDIDATE, TOKENS, num_bytes=4321)


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
