"""The tasks of a recipe, answered by source and candidate, and their rows."""

from collections.abc import Callable, Mapping
from pathlib import Path

from compress.runtime.engine import Engine
from compress.stages.validate.spec import TASKS, Validate, read_gates
from compress.validate.tasks.compare import TaskRow, task_rows
from compress.validate.tasks.task import ERROR, SIDES, Conditions
from compress.validate.tasks.text_model import TextModel


def text_models(engines: Mapping[str, Engine], source_dir: Path) -> dict[str, TextModel]:
    """Return source and candidate with the source's tokenizer: both read the same tokens."""
    return {side: TextModel(engines[side], source_dir) for side in SIDES}


def answer_tasks(
    spec: Validate, models: Mapping[str, TextModel], *, seed: int, progress: Callable[[str], None]
) -> list[TaskRow]:
    """Return one row a task.

    Raises:
        UsageError: an item does not fit the models, or lm-eval has no such metric.
    """
    limits = {
        gate.name.split(".")[1]: gate.limit
        for gate in read_gates(spec.gates)
        if gate.name.startswith(f"{TASKS}.")
    }
    scores = {
        task.name: task.run(
            models,
            Conditions(
                seed=seed,
                limit=limits.get(task.name),
                error=ERROR / len(spec.tasks),  # so that what stopped early stays certain beside the others
                progress=progress,
            ),
        )
        for task in spec.tasks
    }
    return task_rows(scores, {task.name: task.margin for task in spec.tasks}, seed=seed)
