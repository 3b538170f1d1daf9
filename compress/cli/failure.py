"""The outcome of a command that failed: one sentence for people, and the `error` of the JSON document."""

import errno
import signal
from dataclasses import dataclass
from typing import Any

import typer

import compress.errors as errors
from compress.artifact.disk import write_error
from compress.errors import CompressError, Interrupted, StorageError, Terminated

MISUSE: type[Exception] = typer.BadParameter.__bases__[0]
"""The parser's usage error, a class of click that some versions of typer carry inside."""
_DEFECT = 1
_IS_DIRECTORY = "A directory has this name: move it, or name another place."


@dataclass(frozen=True)
class Failure:
    """An error as it is shown. A message without text has been printed already."""

    kind: str
    message: str
    exit_code: int
    where: str | None = None
    hint: str | None = None

    def as_json(self) -> dict[str, str | None]:
        """Return the `error` of the document; its four keys are always there."""
        return {"kind": self.kind, "message": self.message, "where": self.where, "hint": self.hint}

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message


def failure_of(error: BaseException) -> Failure:
    """Return what is shown of an error: a message for users as it is, all else as an internal error."""
    if isinstance(error, CompressError):
        kind = next(each.__name__ for each in type(error).__mro__ if each.__module__ == errors.__name__)
        return Failure(kind, error.message, error.exit_code, error.where, error.hint)
    if isinstance(error, MISUSE):
        return _misuse(error)
    if isinstance(error, OSError):
        return _of_system(error)
    if isinstance(error, Terminated | KeyboardInterrupt | typer.Abort):
        ended = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
        return failure_of(stopped_by(ended))
    lines = str(error).strip().splitlines()
    message = f"internal error: {type(error).__name__}{': ' + lines[0] if lines else ''}"
    return Failure(
        type(error).__name__, _sentence(message), _DEFECT, hint="Run again with --debug to see where."
    )


def _misuse(error: Any) -> Failure:
    """Return what is wrong with the command line."""
    if type(error).__name__ == "NoArgsIsHelpError":  # the parser has printed the help
        return Failure("UsageError", "", error.exit_code)
    param = getattr(error, "param", None)
    where = getattr(error, "option_name", None) or (None if param is None else _name(param))
    path = "compress" if error.ctx is None else error.ctx.command_path
    return Failure(
        "UsageError",
        _sentence(error.format_message()),
        error.exit_code,
        where,
        f"`{path} --help` shows what can be given.",
    )


def _name(param: Any) -> str:
    return str(param.opts[0] if param.param_type_name == "option" else param.name.upper())


def _of_system(error: OSError) -> Failure:
    """Return an error of the operating system with its file, and the advice that there is for its kind."""
    explained = write_error(error)
    if explained is not None:
        return Failure("OSError", explained.message, explained.exit_code, explained.where, explained.hint)
    named = error.filename2 or error.filename  # a rename names its target second
    where = None if named is None else str(named)
    message = f"{where + ': ' if where else ''}{error.strerror or error}"
    advice = _IS_DIRECTORY if error.errno == errno.EISDIR else None
    return Failure("OSError", _sentence(message), StorageError.exit_code, where, advice)


def stopped_by(number: signal.Signals) -> Interrupted:
    """Return the error of a command that a signal ended, other than at a safe point of a run."""
    return Interrupted(
        f"stopped by {number.name} before the work was done.",
        signal_number=number,
        hint="The same command starts again, or resumes.",
    )


def _sentence(text: str) -> str:
    return text if text.rstrip().endswith((".", "?", "!")) else f"{text.rstrip()}."
