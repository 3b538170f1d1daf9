"""Every kind of task: its keys, and its checks before anything runs."""

from pathlib import Path
from typing import get_args

import pytest

from compress.errors import CompressError
from compress.validate.tasks.task import TASKS, Task, check_names

KINDS = dict(TASKS.items())
PLACE = {"jsonl": {"data": "examples/benchmark.jsonl"}, "lm_eval": {}}
"""Keys that a kind requires."""


def task(kind: str, **keys: object) -> Task:
    return KINDS[kind].model_validate({"name": "mine", **PLACE[kind], **keys})


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_called_as_it_is_registered_and_explains_each_key(kind: str) -> None:
    fields = KINDS[kind].model_fields
    assert get_args(fields["kind"].annotation) == (kind,)
    assert [name for name, field in fields.items() if name != "kind" and not field.description] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "keys", [{"name": "a.b"}, {"name": ""}, {"margin": 0}, {"margin": 2}, {"unknown": 1}]
)
def test_a_kind_refuses_names_that_gates_cannot_hold_and_margins_that_are_none(
    kind: str, keys: dict[str, object]
) -> None:
    with pytest.raises(ValueError):
        task(kind, **keys)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_names_its_items_by_a_digest(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert task(kind).identity() == task(kind, margin=0.5).identity()
    assert task(kind).identity().startswith("sha256:")


def test_a_task_that_cannot_run_is_refused_by_its_check() -> None:
    for own in (task("jsonl", data="nowhere.jsonl"), task("lm_eval", task="no such task")):
        with pytest.raises(CompressError):
            own.check(offline=True)


def test_two_tasks_of_one_name_are_refused() -> None:
    with pytest.raises(CompressError, match="two tasks are called 'mine'"):
        check_names((task("jsonl"), task("lm_eval")))
