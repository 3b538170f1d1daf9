"""A benchmark of one's own: a JSONL file of items (`items.py`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from compress.digest import digest_file
from compress.errors import UsageError
from compress.recipe import MAX_SAMPLES, MAX_SEQ_LEN, checked_by
from compress.runtime.request import SamplingParams
from compress.validate.stats import Array
from compress.validate.tasks.items import Item, check_fields, read_items
from compress.validate.tasks.metrics import GENERATED_METRICS, Metric, chosen, extracted, is_match, pattern_of
from compress.validate.tasks.sequential import sequential_estimate
from compress.validate.tasks.task import SIDES, TASKS, Conditions, Task, TaskScores
from compress.validate.tasks.text_model import TextModel

CHUNK = 64
"""Items between two looks of a test that may stop early, and between two words about the progress."""
NUM_SHOWN = 5
_SHOWN_CHARS = 400


@dataclass(frozen=True)
class Answered:
    """The answer of a model to an item, and its score."""

    text: str
    score: float


@TASKS.register("jsonl")
class JsonlTask(Task):
    """Items of a file: questions with choices or a reference."""

    kind: Literal["jsonl"] = "jsonl"
    data: str = Field(min_length=1, description="a .jsonl file, or one packed as .xz, .gz, .bz2 or .zst")
    fields: Annotated[dict[str, str], checked_by(check_fields)] = Field(
        default_factory=dict,
        description="question, choices, answer, reference, metric -> the file's own key",
    )
    metric: Metric | None = Field(
        None, description="by default accuracy for items with choices, exact_match for others"
    )
    num_items: int | None = Field(
        None, ge=1, le=MAX_SAMPLES, description="so many, drawn by the recipe's seed; by default all"
    )
    stop_early: bool = Field(
        False,
        description="take items in random order and stop when the verdict is certain; the error rate of 5 % "
        "holds wherever it stops",
    )
    delimiter: str = Field(" ", max_length=64, description="between a question and its answer")
    chat: bool = Field(False, description="ask by the model's chat template; no delimiter then")
    max_tokens: int = Field(256, ge=1, le=MAX_SEQ_LEN, description="tokens of a generated answer at most")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        ("\n",), max_length=64, description="texts that end a generated answer"
    )
    extract: Annotated[str | None, checked_by(pattern_of)] = Field(
        None, description="regular expression of the answer in a generated text; its last match counts"
    )
    ignore_case: bool = Field(False, description="compare generated answers without case")

    def check(self, *, offline: bool = False) -> None:
        """Check that the file is there and holds items."""
        del offline
        self.items()

    def max_generated(self) -> int:
        """Return `max_tokens` where the answer of some item is generated, else 0."""
        return self.max_tokens if any(item.metric in GENERATED_METRICS for item in self.items()) else 0

    def identity(self) -> str:
        """Return the digest of the file."""
        return digest_file(Path(self.data))

    def run(self, models: Mapping[str, TextModel], conditions: Conditions) -> TaskScores:
        """Return the scores of all items, or of those that made the verdict certain."""
        items = self.items()
        order = np.random.default_rng(conditions.seed).permutation(len(items))[: self.num_items]
        chosen_items = [items[idx] for idx in (order if self.stop_early else np.sort(order))]
        answers: dict[str, list[Answered]] = {side: [] for side in SIDES}
        for start in range(0, len(chosen_items), CHUNK):
            chunk = chosen_items[start : start + CHUNK]
            conditions.progress(f"{self.name}: item {start} of {len(chosen_items)}")
            for side in SIDES:
                answers[side] += self.answers(models[side], chunk)
            if self.stop_early and _is_certain(_scores(answers), self.margin, conditions):
                break
        source_N, candidate_N = _scores(answers)
        facts = {
            "kind": self.kind,
            "data": Path(self.data).name,
            "digest": self.identity(),
        }
        metrics = dict.fromkeys(item.metric for item in chosen_items)
        return TaskScores(
            metric=" and ".join(metrics),
            source_N=source_N,
            candidate_N=candidate_N,
            num_available=len(items),
            sequential=self.stop_early,
            facts=facts,
            lost=_lost(chosen_items, answers),
        )

    def answers(self, model: TextModel, items: Sequence[Item]) -> list[Answered]:
        """Return a model's answers to items, in their order.

        Raises:
            UsageError: an item does not fit the model, or `chat` and the model has no chat template.
        """
        asked = [self._asked(model, item.question) for item in items]
        found: list[Answered | None] = [None] * len(items)
        generated = [idx for idx, item in enumerate(items) if item.metric in GENERATED_METRICS]
        params = SamplingParams(max_tokens=self.max_tokens)
        texts = model.generate([asked[idx] for idx in generated], params, stop=self.stop)
        pattern = pattern_of(self.extract)
        for idx, text in zip(generated, texts, strict=True):
            answer = extracted(text.text, pattern)
            item = items[idx]
            right = is_match(answer, item.references, item.metric, ignore_case=self.ignore_case)
            found[idx] = Answered(answer, float(right))
        compared = [idx for idx in range(len(items)) if found[idx] is None]
        delimiter = "" if self.chat else self.delimiter
        pairs = [
            (asked[idx], delimiter + option)
            for idx in compared
            for option in (items[idx].choices or items[idx].references)
        ]
        scores = iter(model.score(pairs))
        for idx in compared:
            item = items[idx]
            own = [next(scores) for _ in (item.choices or item.references)]
            if item.choices:
                taken = chosen([each.logprob for each in own], item.choices, item.metric)
                found[idx] = Answered(item.choices[taken], float(taken == item.answer))
            else:
                is_greedy = any(each.is_greedy for each in own)
                found[idx] = Answered(item.right if is_greedy else "another text", float(is_greedy))
        return [each for each in found if each is not None]

    def _asked(self, model: TextModel, question: str) -> str:
        return model.render([{"role": "user", "content": question}]) if self.chat else question

    def items(self) -> list[Item]:
        """Return all items of the file.

        Raises:
            UsageError: there is no such file, or a row is no item.
        """
        path = Path(self.data)
        if not path.is_file():
            raise UsageError(
                f"the task {self.name} names {self.data}, which is not a file; its path is relative to the "
                "directory that the command runs in."
            )
        return read_items(path, fields=self.fields, metric=self.metric)


def _scores(answers: Mapping[str, Sequence[Answered]]) -> tuple[Array, Array]:
    source_N, candidate_N = (np.array([each.score for each in answers[side]]) for side in SIDES)
    return source_N, candidate_N


def _is_certain(scores: tuple[Array, Array], margin: float, conditions: Conditions) -> bool:
    """Return whether the gate's verdict cannot change any more, or without a gate whether the drop is
    certainly above nothing or below the margin."""
    estimate = sequential_estimate(scores[0] - scores[1], confidence=1 - conditions.error)
    limit = conditions.limit
    if limit is None:
        return estimate.lower > 0 or estimate.upper <= margin
    return estimate.lower > limit or estimate.upper <= limit


def _lost(items: Sequence[Item], answers: Mapping[str, Sequence[Answered]]) -> tuple[Mapping[str, str], ...]:
    """Return the first items that the source has right and the candidate wrong, as texts for the report."""
    rows: list[Mapping[str, str]] = []
    for item, before, after in zip(items, *(answers[side] for side in SIDES), strict=False):
        if before.score > after.score and len(rows) < NUM_SHOWN:
            texts = {"question": item.question[-_SHOWN_CHARS:], "right": item.right}
            rows.append({**texts, "candidate": after.text[:_SHOWN_CHARS]})
    return tuple(rows)
