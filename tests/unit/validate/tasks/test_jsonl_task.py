"""A benchmark in a JSONL file, answered by two models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.errors import UsageError
from compress.runtime.request import SamplingParams
from compress.validate.tasks.compare import task_rows
from compress.validate.tasks.kinds.jsonl import JsonlTask
from compress.validate.tasks.task import Conditions
from compress.validate.tasks.text_model import TextModel


def task(tmp_path: Path, rows: list[dict[str, Any]], **keys: Any) -> JsonlTask:
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return JsonlTask.model_validate({"name": "own", "data": str(path), **keys})


def choice_rows(num: int) -> list[dict[str, Any]]:
    return [
        {"question": f"x{idx} =", "choices": [f" {idx}", f" f({idx})", " None"], "answer": idx % 3}
        for idx in range(num)
    ]


def test_the_likeliest_choice_is_the_answer(tmp_path: Path, models: dict[str, TextModel]) -> None:
    rows = choice_rows(6)
    found = task(tmp_path, rows, delimiter="").run(models, Conditions())
    for side, scores_N in (("source", found.source_N), ("candidate", found.candidate_N)):
        expected = []
        for row in rows:
            scores = models[side].score([(row["question"], each) for each in row["choices"]])
            best = int(np.argmax([each.logprob for each in scores]))
            expected.append(float(best == row["answer"]))
        assert scores_N.tolist() == expected
    assert 0 < found.source_N.sum() < 6
    assert found.facts["digest"].startswith("sha256:")


def test_generated_and_greedy_answers_are_right_where_the_model_gives_them(
    tmp_path: Path, models: dict[str, TextModel]
) -> None:
    questions = ["def f(", "import os", "while x"]
    texts = models["source"].generate(questions, SamplingParams(max_tokens=6), stop=("\n",))
    rows = [
        row
        for question, text in zip(questions, texts, strict=True)
        for row in (
            {"question": question, "reference": text.text},
            {"question": question, "reference": "something else"},
            {"question": question, "reference": text.text[:3], "metric": "contains"},
        )
        if text.text.strip()
    ]
    own = task(tmp_path, rows, max_tokens=6, delimiter="")
    assert own.run(models, Conditions()).source_N.tolist() == [1.0, 0.0, 1.0] * (len(rows) // 3)
    first = models["source"].generate(["def f("], SamplingParams(max_tokens=1))[0].text
    greedy = [{"question": "def f(", "reference": [each], "metric": "greedy_match"} for each in (first, "@")]
    assert task(tmp_path, greedy, delimiter="").run(models, Conditions()).source_N.tolist() == [1.0, 0.0]


def test_some_items_are_drawn_by_the_seed_and_both_models_answer_them(
    tmp_path: Path, models: dict[str, TextModel]
) -> None:
    whole = task(tmp_path, choice_rows(16)).run(models, Conditions())
    some = task(tmp_path, choice_rows(16), num_items=10)
    first, again, other = (some.run(models, Conditions(seed=seed)) for seed in (1, 1, 2))
    assert first.source_N.tolist() == again.source_N.tolist()
    assert len(first.source_N) == len(other.candidate_N) == 10
    assert (first.num_available, whole.num_available) == (16, 16)


def test_a_model_beside_itself_differs_nowhere_and_stops_once_a_drop_is_ruled_out(
    tmp_path: Path, models: dict[str, TextModel]
) -> None:
    itself = {"source": models["source"], "candidate": models["source"]}
    own = task(tmp_path, choice_rows(130), stop_early=True, margin=0.2)
    found = own.run(itself, Conditions())
    assert found.drops.tolist() == [0.0] * len(found.drops)
    assert 64 <= len(found.drops) < 130
    (row,) = task_rows({"own": found}, {"own": 0.2}, seed=0)
    assert row.verdict == "no difference found"
    assert row.drop.upper <= 0.2
    strict = own.run(itself, Conditions(limit=0.001))
    assert len(strict.drops) == 130


def test_items_that_were_lost_are_shown(tmp_path: Path, models: dict[str, TextModel]) -> None:
    found = task(tmp_path, choice_rows(60), delimiter="").run(models, Conditions())
    lost = int((found.drops > 0).sum())
    assert lost > 0
    assert len(found.lost) == min(lost, 5)
    assert found.lost[0].keys() == {"question", "right", "candidate"}


def test_a_missing_file_is_refused_before_anything_runs(tmp_path: Path) -> None:
    own = task(tmp_path, choice_rows(2))
    own.check()
    with pytest.raises(UsageError, match="not a file"):
        own.model_copy(update={"data": "nowhere.jsonl"}).check()
