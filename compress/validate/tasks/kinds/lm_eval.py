"""Tasks of lm-eval (EleutherAI/lm-evaluation-harness) on the bundled engine. Needs the extra `[eval]`."""

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from pydantic import Field

from compress.digest import digest_json
from compress.errors import EnvironmentUnfit, UsageError, did_you_mean
from compress.plugins import installed_version
from compress.recipe import MAX_SAMPLES
from compress.validate.stats import Array
from compress.validate.tasks.task import SIDES, TASKS, Conditions, Task, TaskScores
from compress.validate.tasks.text_model import TextModel

PACKAGE = "lm_eval"
PREFERRED = ("acc", "exact_match", "acc_norm")
"""Metrics that are taken where a recipe names none, the first that a task has."""
Sample = Mapping[str, Any]


@TASKS.register("lm_eval")
class LmEvalTask(Task):
    """A task, or a group of tasks, of lm-eval; its data set is downloaded by lm-eval."""

    kind: Literal["lm_eval"] = "lm_eval"
    task: str | None = Field(None, min_length=1, description="lm-eval's name of the task; by default `name`")
    metric: str | None = Field(
        None,
        min_length=1,
        description="of each item, such as acc_norm; by default acc, exact_match or acc_norm",
    )
    filter: str | None = Field(
        None, min_length=1, description="such as flexible-extract of gsm8k; by default the task's first"
    )
    num_fewshot: int | None = Field(
        None, ge=0, le=100, description="examples before each question; by default the task's own number"
    )
    limit: int | None = Field(
        None, ge=1, le=MAX_SAMPLES, description="only the first so many items of each task"
    )
    chat: bool = Field(False, description="ask by the model's chat template")

    @property
    def lm_eval_name(self) -> str:
        """The task as lm-eval calls it."""
        return self.task or self.name

    def check(self, *, offline: bool = False) -> None:
        """Check that lm-eval is installed and has the task."""
        if installed_version(PACKAGE) is None:
            raise EnvironmentUnfit(
                f"the task {self.name} needs lm-eval, which is not installed: pip install 'compress[eval]'."
            )
        if offline:
            raise UsageError(
                f"the task {self.name} is lm-eval's, which downloads its data set: leave --offline out, "
                "or make a "
                "JSONL file of its items (kind: jsonl)."
            )
        from lm_eval.tasks import TaskManager

        with _quiet():
            names = TaskManager().all_tasks
        if self.lm_eval_name not in names:
            raise UsageError(
                f"lm-eval has no task '{self.lm_eval_name}'.{did_you_mean(self.lm_eval_name, names)}"
            )

    def identity(self) -> str:
        """Return a digest of lm-eval's version: its tasks and the names of their data sets come with it."""
        return digest_json({PACKAGE: installed_version(PACKAGE), "task": self.lm_eval_name})

    def run(self, models: Mapping[str, TextModel], conditions: Conditions) -> TaskScores:
        """Return the scores of all items.

        Raises:
            UsageError: the task has no such metric or filter, or its metric is no number an item.
        """
        conditions.progress(f"{self.name}: lm-eval")
        results = {side: self.evaluate(models[side], seed=conditions.seed) for side in SIDES}
        return self.scores(results)

    def evaluate(self, model: TextModel, *, seed: int, manager: Any = None) -> Mapping[str, Any]:
        """Return lm-eval's results of a model, with all items. `manager` finds tasks; by default those that
        come with lm-eval."""
        from lm_eval.evaluator import simple_evaluate

        from compress.validate.tasks.lm_eval_model import EngineLM

        with _quiet():
            found: Mapping[str, Any] = simple_evaluate(
                model=EngineLM(model),
                tasks=[self.lm_eval_name],
                num_fewshot=self.num_fewshot,
                limit=self.limit,
                apply_chat_template=self.chat,
                bootstrap_iters=0,
                log_samples=True,
                task_manager=manager,
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
            )
        return found

    def scores(self, results: Mapping[str, Mapping[str, Any]]) -> TaskScores:
        """Return the scores of the items of both models, side by side."""
        samples = {side: self._samples(results[side]) for side in SIDES}
        first = next(iter(samples["source"].values()))
        metric = self.metric or next((each for each in PREFERRED if each in first), None)
        if metric is None or metric not in first:
            known = [each for each in first["metrics"] if each in first]
            raise UsageError(
                f"the task {self.name} has no metric '{metric or PREFERRED[0]}'; it has {', '.join(known)}."
            )
        if samples["source"].keys() != samples["candidate"].keys():
            raise UsageError(f"lm-eval gave source and candidate other items of {self.name}.")
        keys = sorted(samples["source"])
        source_N, candidate_N = (
            _values([samples[side][key][metric] for key in keys], self.name, metric) for side in SIDES
        )
        return TaskScores(
            metric=metric,
            source_N=source_N,
            candidate_N=candidate_N,
            num_available=self._num_available(results["source"]) or len(keys),
            facts=self._facts(results["source"]),
        )

    def _samples(self, result: Mapping[str, Any]) -> dict[tuple[str, int], Sample]:
        """Return the items of a result through one filter, by task and number."""
        found: dict[tuple[str, int], Sample] = {}
        for task, rows in result["samples"].items():
            filters = dict.fromkeys(row["filter"] for row in rows)
            name = self.filter or next(iter(filters), None)
            if name not in filters:
                raise UsageError(
                    f"lm-eval's task {task} has no filter '{name}'.{did_you_mean(str(name), filters)}"
                )
            found |= {(task, row["doc_id"]): row for row in rows if row["filter"] == name}
        if not found:
            raise UsageError(f"lm-eval gave no items of {self.name}.")
        return found

    @staticmethod
    def _num_available(result: Mapping[str, Any]) -> int:
        return sum(int(each.get("original", 0)) for each in result.get("n-samples", {}).values())

    def _facts(self, result: Mapping[str, Any]) -> dict[str, Any]:
        versions = {str(name): str(version) for name, version in result.get("versions", {}).items()}
        return {
            "kind": self.kind,
            "data": f"lm-eval {installed_version(PACKAGE)}, {self.lm_eval_name}",
            "versions": ", ".join(dict.fromkeys(versions.values())),
        }


def _values(values: list[Any], name: str, metric: str) -> Array:
    """Return the scores of items.

    Raises:
        UsageError: they are no numbers from 0 to 1.
    """
    numbers = [float(each) for each in values if isinstance(each, bool | int | float | np.number)]
    if len(numbers) != len(values) or not all(0 <= each <= 1 for each in numbers):
        raise UsageError(
            f"the metric {metric} of {name} is not a score from 0 to 1 an item, so models cannot be "
            "compared item "
            "by item; name another one."
        )
    return np.array(numbers)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the bars and notes of lm-eval off the terminal while the block runs."""
    logger = logging.getLogger(PACKAGE)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
