"""The keys that every task of a recipe has, whatever its kind, and its result: the scores of source and
candidate on the same items.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from compress.errors import UsageError
from compress.plugins import PluginSet
from compress.recipe import MAX_BATCH, MAX_SEQ_LEN, ByKind, Spec
from compress.validate.stats import Array
from compress.validate.tasks.text_model import TextModel

SIDES = ("source", "candidate")
ERROR = 0.05
"""Probability of a wrong verdict of a task: intervals are at 1 - ERROR."""


@dataclass(frozen=True)
class Conditions:
    """How a task is run: the seed that draws items, the limit of its gate if there is one, the error rate
    of a test that may stop early, and a function that is called with words about the progress."""

    seed: int = 0
    limit: float | None = None
    error: float = ERROR
    progress: Callable[[str], None] = lambda note: None


@dataclass(frozen=True)
class TaskScores:
    """The scores [N] of both models on the same items, in [0, 1], of `num_available` that the task has.

    `sequential`: items were taken in random order until the verdict was certain. `facts` are for the report:
    what the task is and where its items come from. `lost` are some items that the candidate lost.
    """

    metric: str
    source_N: Array
    candidate_N: Array
    num_available: int
    sequential: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    lost: tuple[Mapping[str, str], ...] = ()

    @property
    def drops(self) -> Array:
        """The drop of each item: source - candidate."""
        return self.source_N - self.candidate_N


class Task(Spec):
    """Keys that every task has, whatever its kind."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_-]{1,64}$",
        description="name in gates (tasks.<name>.accuracy_drop) and the report",
    )
    margin: float = Field(
        0.01, gt=0, le=1, description="smallest drop that matters: 0.01 is one item in a hundred"
    )
    batch_size: int = Field(8, ge=1, le=MAX_BATCH, description="texts that are generated at once")
    max_length: int = Field(
        2048,
        ge=8,
        le=MAX_SEQ_LEN,
        description="tokens of the longest question with its answer; longer questions lose their beginning",
    )

    @abstractmethod
    def check(self, *, offline: bool = False) -> None:
        """Check, before anything runs, that the task can run here.

        Raises:
            UsageError: it cannot; the sentence has the remedy.
            EnvironmentUnfit: a package is missing.
        """

    def max_generated(self) -> int:
        """Return the most tokens of a generated answer; 0 where no answer is generated, or where only the
        task's own program states how many."""
        return 0

    @abstractmethod
    def identity(self) -> str:
        """Return a digest of the items, for the key of a cached result."""

    @abstractmethod
    def run(self, models: Mapping[str, TextModel], conditions: Conditions) -> TaskScores:
        """Return the scores of `source` and `candidate`."""


TASKS: PluginSet[type[Task]] = PluginSet("task", "compress.validate.tasks.kinds")
AnyTask = Annotated[Task, ByKind(lambda: dict(TASKS.items()))]
"""The type of a key that holds one task of any kind."""


def check_names(tasks: tuple[Task, ...]) -> None:
    """Raise UsageError if two tasks have one name."""
    names = [each.name for each in tasks]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two tasks are called '{name}'; give one of them another name.")
