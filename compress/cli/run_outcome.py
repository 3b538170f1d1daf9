"""Reports the outcome of `compress run` and `resume` as metrics and to the webhooks that the recipe names,
after the document is printed. Neither the document nor the exit code changes by it.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.cli.output import leads, note, when_finished
from compress.errors import CompressError, UsageError

if TYPE_CHECKING:
    from compress.recipe import Notify


def report_outcome(
    recipe_file: Path, name: str, *, case: str | None = None, metrics_file: Path | None = None
) -> None:
    """Have the outcome of this run reported, whatever it will be; of several ranks, rank 0 reports.

    Raises:
        UsageError: metrics cannot be written to that file.
    """
    from compress.outcome.metrics_file import check_metrics_file

    if metrics_file is not None:
        check_metrics_file(metrics_file)
    if leads():
        when_finished(_Report(name, metrics_file, _hooks_of(recipe_file, case)))


def _hooks_of(recipe_file: Path, case: str | None) -> "Sequence[Notify]":
    """Return the webhooks of a recipe; none of one that cannot be read, for which the run itself ends."""
    from compress.recipe import load_recipe

    try:
        return load_recipe(recipe_file, case=case).notify
    except (UsageError, OSError):
        return ()


@dataclass(frozen=True)
class _Report:
    """Called with the JSON document of the run."""

    recipe: str
    metrics_file: Path | None
    hooks: "Sequence[Notify]"
    started_s: float = field(default_factory=time.monotonic)

    def __call__(self, document: Mapping[str, Any]) -> None:
        """Write the metrics, then notify; what fails is a warning."""
        if self.metrics_file is not None:
            self._write_metrics(self.metrics_file, document)
        if self.hooks:
            from compress.outcome.webhook import notify

            notify(self.hooks, document, recipe=self.recipe, environ=os.environ, warn=_warn)

    def _write_metrics(self, path: Path, document: Mapping[str, Any]) -> None:
        from compress.outcome.metrics_file import write_metrics

        try:
            seconds = time.monotonic() - self.started_s
            write_metrics(path, document, recipe=self.recipe, seconds=seconds, now_s=time.time())
        except (CompressError, OSError) as error:
            _warn(f"no metrics were written to {path}: {error}")


def _warn(sentence: str) -> None:
    note(f"warning: {sentence}")
