"""The items of a benchmark in a JSONL file (packed or not), one a line:

    {"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}
    {"question": "The capital of France is", "reference": "Paris"}
    {"question": "...", "reference": ["colour", "color"], "metric": "contains"}

`answer` is the index of the right choice, from 0; `reference` a text, or several of which each is right.
`metric` is one of `metrics.py`; by default that of the task, else `accuracy` or `exact_match`. `fields`
names the keys of a file that has others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from compress.data.text_files import json_rows
from compress.errors import UsageError, did_you_mean
from compress.validate.tasks.metrics import CHOICE_METRICS, METRICS, Metric

FIELDS = ("question", "choices", "answer", "reference", "metric")


@dataclass(frozen=True)
class Item:
    """One item: with `choices` and the index of the right one, or with `references`."""

    question: str
    metric: Metric
    choices: tuple[str, ...] = ()
    answer: int = 0
    references: tuple[str, ...] = ()

    @property
    def right(self) -> str:
        """The right answer, or the first of them."""
        return self.choices[self.answer] if self.choices else self.references[0]


def check_fields(fields: Mapping[str, str]) -> None:
    """Raise UsageError for a name that is none of `FIELDS`."""
    for name in fields:
        if name not in FIELDS:
            raise UsageError(f"fields: items have no '{name}'.{did_you_mean(name, FIELDS)}")


def read_items(
    path: Path, *, fields: Mapping[str, str] | None = None, metric: Metric | None = None
) -> list[Item]:
    """Return the items of a file.

    Raises:
        UsageError: a row is no item, with its line; or there is none.
        StorageError: the file cannot be read.
    """
    names = {name: name for name in FIELDS} | dict(fields or {})
    items = [_item(row, names, metric, f"{path}:{line}") for line, row in json_rows(path)]
    if not items:
        raise UsageError(f"{path}: there is no item in it.")
    return items


def _item(row: Mapping[str, Any], names: Mapping[str, str], metric: Metric | None, where: str) -> Item:
    own = {name: row[key] for name, key in names.items() if key in row}
    question = own.get("question")
    if not isinstance(question, str):
        raise UsageError(f"{where}: an item needs '{names['question']}', a text.")
    choices = own.get("choices")
    if (choices is None) == ("reference" not in own):
        raise UsageError(
            f"{where}: an item has either '{names['choices']}' and '{names['answer']}', or "
            f"'{names['reference']}'."
        )
    chosen = _metric(own.get("metric", metric), has_choices=choices is not None, where=where)
    if choices is None:
        references = own["reference"] if isinstance(own["reference"], list) else [own["reference"]]
        if not references or not all(isinstance(each, str) and each for each in references):
            raise UsageError(f"{where}: '{names['reference']}' is a text, or a list of texts, none empty.")
        return Item(question, chosen, references=tuple(references))
    texts = choices if isinstance(choices, list) else []
    if len(texts) < 2 or not all(isinstance(each, str) and each for each in texts):
        raise UsageError(f"{where}: '{names['choices']}' is a list of two texts or more, none empty.")
    answer = own.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise UsageError(
            f"{where}: '{names['answer']}' is the index of the right choice, 0 to {len(choices) - 1}, not "
            f"{answer!r:.40}."
        )
    return Item(question, chosen, choices=tuple(choices), answer=answer)


def _metric(stated: Any, *, has_choices: bool, where: str) -> Metric:
    if stated is None:
        return "accuracy" if has_choices else "exact_match"
    if stated not in METRICS:
        raise UsageError(f"{where}: unknown metric {stated!r:.40}.{did_you_mean(str(stated), METRICS)}")
    if (stated in CHOICE_METRICS) != has_choices:
        kind = "choices" if stated in CHOICE_METRICS else "a reference"
        raise UsageError(f"{where}: the metric {stated} is for items with {kind}.")
    return cast(Metric, stated)
