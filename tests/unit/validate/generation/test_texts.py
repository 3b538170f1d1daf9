"""Texts of two models beside one another."""

import json
from pathlib import Path

import pytest

from compress.errors import UsageError
from compress.runtime.request import SamplingParams
from compress.validate.generation.texts import compare_texts, first_difference, read_prompts
from compress.validate.tasks.text_model import TextModel

PROMPTS = ["def f(", "import os\n", "class A", "x = [", "for i", "return"]


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [
        ((1, 2, 3), (1, 2, 3), None),
        ((1, 2), (1, 3), 1),
        ((1, 2), (1, 2, 3), 2),
        ((), (5,), 0),
        ((), (), None),
    ],
)
def test_the_first_difference(one: tuple[int, ...], other: tuple[int, ...], place: int | None) -> None:
    assert first_difference(one, other) == first_difference(other, one) == place


def test_a_model_beside_itself_makes_the_same_texts_greedy_and_sampled(models: dict[str, TextModel]) -> None:
    params = {
        "greedy": SamplingParams(max_tokens=8),
        "sampled": SamplingParams(max_tokens=8, temperature=1.0, seed=3),
    }
    itself = {"source": models["source"], "candidate": models["source"]}
    for row in compare_texts(itself, PROMPTS, params, num_shown=2):
        assert row.num_same == row.num_prompts == len(PROMPTS)
        assert set(row.same_frac) == {1.0}
        assert row.length_shift.value == row.repeated_shift.value == 0.0
        assert row.common_p50 == pytest.approx(row.length_source, abs=8)
        assert [(each.source, each.candidate, each.position) for each in row.examples] == [("", "", None)] * 2


def test_texts_of_other_models_part_where_their_tokens_differ(models: dict[str, TextModel]) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=5, ignore_eos=True)
    (row,) = compare_texts(models, PROMPTS, {"sampled": params}, num_shown=len(PROMPTS))
    texts = {
        side: model.generate(PROMPTS, [
            SamplingParams(max_tokens=10, temperature=1.0, seed=5 + idx, ignore_eos=True)
            for idx in range(len(PROMPTS))
        ])
        for side, model in models.items()
    }  # fmt: skip
    places = [
        first_difference(a.tokens, b.tokens) for a, b in zip(texts["source"], texts["candidate"], strict=True)
    ]
    assert [each.position for each in row.examples] == places
    parted = [place for place in places if place is not None]
    assert parted, "the candidate is disturbed enough to part"
    for tokens, share in zip(row.same_tokens, row.same_frac, strict=True):
        assert share == pytest.approx(1 - sum(place < tokens for place in parted) / len(PROMPTS))
    for each, own in zip(row.examples, texts["source"], strict=True):
        assert each.common + each.source == own.text
    assert row.length_source == row.length_candidate == 10
    assert row.ended_source == 0.0


def test_prompts_are_read_from_rows_turns_and_lines(tmp_path: Path) -> None:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text(
        "\n".join(map(json.dumps, [{"prompt": "a"}, {"turns": ["b", "c"]}, {"prompt": "d"}])),
        encoding="utf-8",
    )
    assert read_prompts(rows, 2) == ["a", "b"]
    assert read_prompts(rows, 9) == ["a", "b", "d"]
    lines = tmp_path / "prompts.txt"
    lines.write_text("one\n\ntwo\nthree\n", encoding="utf-8")
    assert read_prompts(lines, 2) == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"text": "b"}\n', r":2: a row needs a `prompt`"),
        ('{"prompt": "a"}\n', "two prompts"),
    ],
)
def test_files_without_prompts_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read_prompts(path, 8)
    with pytest.raises(UsageError, match="not a file of prompts"):
        read_prompts(tmp_path / "nowhere.jsonl", 8)
