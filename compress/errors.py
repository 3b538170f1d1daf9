"""Errors for users. Each carries one paragraph (what, where, what to do) and the exit code of the
process.

Exit codes (a frozen surface, see README): 0 done, 1 internal error, 2 recipe or usage, 3 a gate failed, 4
environment or hardware, 5 registry or input/output, 75 lock held or transient, 130 / 143 interrupted by
SIGINT / SIGTERM and resumable.
"""

import difflib
import re
from collections.abc import Iterable

_POSITION = re.compile(r"(\S[^\n]*?:\d+:\d+): ")


class CompressError(Exception):
    """Base of every error with a message for a user; anything else that escapes is a defect (exit code 1).

    `where` is the file, position, key or option that the error is about, and `hint` the sentence on what to
    do that follows the message, each where it is known apart from the message.
    """

    exit_code = 1

    def __init__(self, message: str = "", *, where: object = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = None if where is None else str(where)
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message


class UsageError(CompressError):
    """The command line, a recipe, a data card or an input file asks for something that cannot be done."""

    exit_code = 2


class QueueFull(UsageError):
    """The queue of an engine is full; trying again later is right."""

    exit_code = 75


class RecipeError(UsageError):
    """A recipe or data card is wrong; the message starts with `file:line:column` where that is known."""

    def __init__(self, message: str = "", *, where: object = None, hint: str | None = None) -> None:
        position = _POSITION.match(message)
        super().__init__(message, where=position[1] if where is None and position else where, hint=hint)


class UnsupportedArch(UsageError):
    """A checkpoint has a block or a config field that the canonical decoder does not support; nothing is ever
    guessed.
    """


class UnsupportedFormat(UsageError):
    """A file or tensor layout that is not read or written here (pickles among them)."""


class GateFailed(CompressError):
    """A validation gate failed: the artifact is kept and not pushed."""

    exit_code = 3


class EnvironmentUnfit(CompressError):
    """Hardware, driver or an installed package cannot do what was asked."""

    exit_code = 4


class StorageError(CompressError):
    """A registry, file or network transfer failed or did not match its digest."""

    exit_code = 5


class SignatureRefused(StorageError):
    """A model is not signed, not by whom it must be, or is not what was signed."""


class LockHeld(CompressError):
    """Another process works on the same run, or has the workspace alone; trying again later is right."""

    exit_code = 75


class Interrupted(CompressError):
    """A signal asked the command to stop; a run stopped at a boundary from which it resumes."""

    def __init__(self, message: str, *, signal_number: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = 128 + signal_number


class RunsFailed(CompressError):
    """Some of several runs failed; the exit code is that of the worst of them."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Terminated(BaseException):
    """SIGTERM asked the process to end. It is no `Exception`, so that no handler of errors takes it for one
    of its own, and `with` and `finally` clean up on its way out.
    """

    exit_code = 143


class RankStopped(CompressError):
    """Another rank of the same job failed or was stopped; the message and the exit code are that rank's."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the nearest known word, or the known words when none is near."""
    choices = sorted(known)
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    if near:
        return f" Did you mean '{near[0]}'?"
    return f" Known: {', '.join(choices)}." if choices else ""
