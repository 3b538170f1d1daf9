"""Perplexity by position, and a fact in a long text."""

import math

import numpy as np
import pytest
import torch

from compress.errors import UsageError
from compress.validate.accuracy import measure_accuracy
from compress.validate.generation.needle import needle_pairs, probe
from compress.validate.generation.positions import by_position
from compress.validate.tasks.text_model import TextModel

VOCAB = 40
GENERATOR = torch.Generator().manual_seed(0)
TOKENS_NS = torch.randint(VOCAB, (6, 33), generator=GENERATOR)
SOURCE_SV = torch.randn(33, VOCAB, generator=GENERATOR)


def source(tokens_BS: torch.Tensor) -> torch.Tensor:
    return SOURCE_SV.expand(tokens_BS.shape[0], -1, -1)


def worse_to_the_end(tokens_BS: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(33, VOCAB, generator=torch.Generator().manual_seed(1))
    return (SOURCE_SV + noise * torch.linspace(0, 2, 33).unsqueeze(1)).expand(tokens_BS.shape[0], -1, -1)


def test_buckets_together_are_the_whole_perplexity() -> None:
    rows = by_position(source, worse_to_the_end, TOKENS_NS, num_buckets=4)
    whole = measure_accuracy(source, worse_to_the_end, TOKENS_NS, num_bytes=100)
    assert [(row.start, row.stop) for row in rows] == [(1, 9), (9, 17), (17, 25), (25, 33)]
    for mine, theirs in (("ppl_source", whole.ppl_source), ("ppl_candidate", whole.ppl_candidate)):
        mean = np.mean([math.log(getattr(row, mine)) for row in rows])
        assert math.exp(mean) == pytest.approx(theirs.value, rel=1e-6)
    assert np.mean([row.kl_mean.value for row in rows]) == pytest.approx(whole.kl_mean.value, rel=1e-6)


def test_an_error_that_grows_with_the_context_shows_in_the_last_bucket() -> None:
    rows = by_position(source, worse_to_the_end, TOKENS_NS, num_buckets=4)
    kl = [row.kl_mean.value for row in rows]
    assert kl == sorted(kl)
    assert kl[-1] > 10 * kl[0]
    for row in by_position(source, source, TOKENS_NS, num_buckets=3):
        assert (row.ppl_ratio.value, row.kl_mean.value) == (1.0, 0.0)


def test_too_few_windows_or_positions_are_refused() -> None:
    with pytest.raises(UsageError, match="two windows at least"):
        by_position(source, source, TOKENS_NS[:1], num_buckets=2)
    with pytest.raises(UsageError, match="a position a bucket"):
        by_position(source, source, TOKENS_NS, num_buckets=33)


def test_the_fact_lies_at_its_depth_and_the_context_has_its_length(models: dict[str, TextModel]) -> None:
    model = models["source"]
    text = model.encode("x = 1\n" * 200)
    for depth in (0.0, 0.5, 1.0):
        ((context, answer),) = needle_pairs(model, [text], length=120, depth=depth, seed=0)
        assert len(context) + len(answer) == 120
        written = model.decode(context)
        number = model.decode(answer)
        name, _, _ = written.rpartition("The number of the")[2].partition(" is")
        assert written.endswith(f"The number of the{name} is")
        fact = f"The number of the{name} is{number}."
        assert written.count(fact) == 1
        place = written.index(fact) / written.rindex(" The number")
        assert place == pytest.approx(depth * (1 - len(fact) / len(written)), abs=0.12)
    same, other = (needle_pairs(model, [text], length=120, depth=0.5, seed=seed) for seed in (0, 1))
    assert same == needle_pairs(model, [text], length=120, depth=0.5, seed=0) != other


def test_both_models_read_the_same_texts_and_a_model_beside_itself_changes_nothing(
    models: dict[str, TextModel],
) -> None:
    texts = [models["source"].encode(f"y = {idx}\n" * 200) for idx in range(3)]
    compared = {"source": models["source"], "itself": models["source"], "candidate": models["candidate"]}
    rows = probe(compared, texts, lengths=(100,), depths=(0.0, 1.0), seed=0)
    assert [(row.model, row.depth) for row in rows] == [
        (model, depth) for depth in (0.0, 1.0) for model in compared
    ]
    for before, itself, after in (rows[:3], rows[3:]):
        assert before.change is None
        assert itself.change is not None
        assert after.change is not None
        assert itself.change.value == 0.0
        assert after.change.value == pytest.approx(after.logprob - before.logprob, abs=1e-9)
        assert after.change.value != 0.0


def test_lengths_without_room_are_refused(models: dict[str, TextModel]) -> None:
    with pytest.raises(UsageError, match="Set other lengths"):
        probe({"source": models["source"]}, [[1, 2, 3]], lengths=(100,), depths=(0.5,), seed=0)
