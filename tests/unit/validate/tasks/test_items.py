"""Items of a JSONL file: what is read, and the sentence for each row that is none."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from compress.errors import UsageError
from compress.validate.tasks.items import Item, check_fields, read_items
from compress.validate.tasks.metrics import Metric, chosen, extracted, is_match, pattern_of


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def test_rows_become_items(tmp_path: Path) -> None:
    path = write(
        tmp_path / "own.jsonl",
        {"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1},
        {"question": "France", "reference": "Paris", "metric": "greedy_match"},
        {"question": "A colour", "reference": ["colour", "color"], "id": 7},
    )
    assert read_items(path) == [
        Item("2 + 2 =", "accuracy", choices=("3", "4"), answer=1),
        Item("France", "greedy_match", references=("Paris",)),
        Item("A colour", "exact_match", references=("colour", "color")),
    ]
    assert read_items(path)[0].right == "4"


def test_a_packed_file_with_other_keys_is_read_by_the_names_of_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "theirs.jsonl.xz"
    path.write_bytes(lzma.compress(json.dumps({"query": "q", "choices": ["a", "b"], "gold": 0}).encode()))
    items = read_items(path, fields={"question": "query", "answer": "gold"}, metric="accuracy_per_char")
    assert items == [Item("q", "accuracy_per_char", choices=("a", "b"), answer=0)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"choices": ["a", "b"], "answer": 0}, r":2: an item needs 'question'"),
        ({"question": "q"}, r":2: an item has either 'choices' and 'answer', or 'reference'"),
        ({"question": "q", "choices": ["a", "b"], "answer": 0, "reference": "a"}, "either"),
        ({"question": "q", "choices": ["a"], "answer": 0}, "two texts or more"),
        ({"question": "q", "choices": ["a", ""], "answer": 0}, "none empty"),
        ({"question": "q", "choices": ["a", "b"], "answer": 2}, r"0 to 1, not 2"),
        ({"question": "q", "choices": ["a", "b"], "answer": True}, "0 to 1, not True"),
        ({"question": "q", "choices": ["a", "b"], "answer": "a"}, "0 to 1, not 'a'"),
        ({"question": "q", "reference": []}, "a text, or a list of texts"),
        ({"question": "q", "reference": "a", "metric": "acuracy"}, "unknown metric 'acuracy'"),
        ({"question": "q", "reference": "a", "metric": "accuracy"}, "for items with choices"),
        ({"question": "q", "choices": ["a", "b"], "answer": 0, "metric": "contains"}, "with a reference"),
    ],
)
def test_a_row_that_is_no_item_is_refused_with_its_line(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "own.jsonl", {"question": "q", "reference": "a"}, row)
    with pytest.raises(UsageError, match=message):
        read_items(path)


def test_a_file_without_items_and_a_field_that_items_do_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no item in it"):
        read_items(write(tmp_path / "empty.jsonl"))
    with pytest.raises(UsageError, match=r"items have no .questoin.\. Did you mean"):
        check_fields({"questoin": "query"})


def test_a_long_choice_wins_by_its_likelihood_a_character() -> None:
    choices = ("a", "a much longer choice")
    assert chosen([-4.0, -10.0], choices, "accuracy") == 0
    assert chosen([-4.0, -10.0], choices, "accuracy_per_char") == 1
    assert chosen([-1.0, -1.0], choices, "accuracy") == 0


@pytest.mark.parametrize(
    ("text", "pattern", "answer"),
    [
        ("  42 \n", None, "42"),
        ("first 1, then 2. The answer is 3.", r"\d+", "3"),
        ("#### 17\nmore", r"#### (\d+)", "17"),
        ("no number", r"\d+", ""),
    ],
)
def test_the_last_match_is_the_answer(text: str, pattern: str | None, answer: str) -> None:
    assert extracted(text, pattern_of(pattern)) == answer


@pytest.mark.parametrize(
    ("answer", "metric", "ignore_case", "right"),
    [
        ("Paris ", "exact_match", False, True),
        ("paris", "exact_match", False, False),
        ("paris", "exact_match", True, True),
        ("It is Paris.", "exact_match", False, False),
        ("It is Paris.", "contains", False, True),
        ("", "contains", False, False),
    ],
)
def test_answers_match_references(answer: str, metric: Metric, ignore_case: bool, right: bool) -> None:
    assert is_match(answer, ("Paris", "Lutetia"), metric, ignore_case=ignore_case) == right


def test_what_is_no_regular_expression_is_refused() -> None:
    with pytest.raises(UsageError, match="not a regular expression"):
        pattern_of("(")
