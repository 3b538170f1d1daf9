"""One run of a recipe as a scheduler is to start it: the command, when, and in which surroundings."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import PurePosixPath

from compress.errors import UsageError, did_you_mean
from compress.schedule.cron_expression import CronExpression

FINAL_EXIT_CODES = (2, 3, 4)
"""A wrong recipe, a failed gate, an unfit machine: another try ends the same way."""
RETRIED_EXIT_CODES = (5, 75, 143)
"""Input or output, a workspace that another run holds, SIGTERM: another try resumes."""
STOP_SECONDS = 600
"""Time that a run gets between SIGTERM and SIGKILL: it stops at the next layer boundary."""
MAX_RETRIES = 3
RETRY_MINUTES = 10
_MAX_NAME = 52
"""Longest name: Kubernetes appends eleven characters to that of a CronJob, and a label has 63."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


@dataclass(frozen=True)
class Volume:
    """Storage that outlives a run, and the path where the run finds it."""

    claim: str
    path: str

    @classmethod
    def parse(cls, text: str) -> "Volume":
        """Return the volume of `claim:/path`.

        Raises:
            UsageError: it is not of that form.
        """
        claim, _, path = text.partition(":")
        if not _NAME.fullmatch(claim) or not path.startswith("/"):
            raise UsageError(
                f"--volume {text}: write the name of a persistent volume claim and an absolute path, such as "
                "models:/srv/models.",
                where="--volume",
            )
        return cls(claim, path)


@dataclass(frozen=True)
class ScheduledRun:
    """`recipe` is the path as the scheduler's machine finds it from `workdir`; `options` are words for
    `compress run` after it. What a scheduler has no place for is refused by its target.
    """

    recipe: str
    name: str
    executable: str = "compress"
    options: tuple[str, ...] = ()
    schedule: CronExpression | None = None
    timezone: str | None = None
    workdir: str | None = None
    image: str | None = None
    gpus: str | None = None
    volumes: tuple[Volume, ...] = ()
    runners: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check what no scheduler can be given.

        Raises:
            UsageError: a name, a path or a time zone that cannot be one.
        """
        if not _NAME.fullmatch(self.name) or len(self.name) > _MAX_NAME:
            raise UsageError(
                f"'{self.name}' cannot name a schedule: take at most {_MAX_NAME} lower-case letters, digits "
                "and hyphens, such as --name nightly.",
                where="--name",
            )
        for field in fields(self):
            value = getattr(self, field.name)
            for text in (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ():
                _check_text(str(text.path if isinstance(text, Volume) else text), field.name)
        if self.recipe.startswith("-"):
            raise UsageError(f"the recipe '{self.recipe}' would be read as an option; write ./ before it.")
        if self.timezone is not None:
            _check_timezone(self.timezone)

    def words(self, *more: str) -> tuple[str, ...]:
        """Return the command, word by word."""
        return (self.executable, "run", self.recipe, "--if-changed", *self.options, *more)

    def command(self, *more: str) -> str:
        """Return the command for a POSIX shell, every word quoted where it must be."""
        return shlex.join(self.words(*more))

    @property
    def directory(self) -> str:
        """The directory in which the run starts.

        Raises:
            UsageError: it is not absolute.
        """
        if self.workdir is None or not PurePosixPath(self.workdir).is_absolute():
            raise UsageError(f"--workdir {self.workdir}: give an absolute path.", where="--workdir")
        return self.workdir

    @property
    def program(self) -> str:
        """The absolute path of the executable, for schedulers that search it in few places.

        Raises:
            UsageError: it is not absolute.
        """
        if not PurePosixPath(self.executable).is_absolute():
            raise UsageError(
                f"--executable {self.executable}: this scheduler does not search your PATH; give the "
                "absolute path, such as /srv/models/.venv/bin/compress.",
                where="--executable",
            )
        return self.executable


def name_of(recipe: str) -> str:
    """Return the name that a schedule gets from its recipe's file."""
    stem = PurePosixPath(recipe).name.removesuffix(".yaml").removesuffix(".yml").lower()
    return re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:_MAX_NAME].strip("-")


def run_options(
    *, metrics_file: str | None, workspace: str | None, device: str | None, offline: bool
) -> tuple[str, ...]:
    """Return the words of these options of `compress run`; none for one that is not given."""
    given: Mapping[str, str | None] = {
        "--workspace": workspace,
        "--device": device,
        "--metrics-file": metrics_file,
    }
    words = [word for flag, value in given.items() if value is not None for word in (flag, value)]
    return (*words, "--offline") if offline else tuple(words)


def _check_text(text: str, field: str) -> None:
    if not text or not text.isprintable() or text != text.strip():
        raise UsageError(
            f"{field}: {text!r} is empty, begins or ends with a space, or has a character that is not "
            "printed.",
            where=field,
        )


def _check_timezone(name: str) -> None:
    from zoneinfo import available_timezones

    known = available_timezones()  # empty where the system has no database
    if not re.fullmatch(r"[A-Za-z0-9_+/-]+", name) or (known and name not in known):
        near = did_you_mean(name, known)
        raise UsageError(
            f"there is no time zone '{name}'."
            f"{near if 'mean' in near else ' Write one such as Europe/Berlin.'}",
            where="--timezone",
        )
