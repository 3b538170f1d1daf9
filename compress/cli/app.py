"""The `compress` command: which commands there are, and what becomes of an error.

To add a command, write one file that defines one function, and one line below (a command of two words in
`GROUPS`). A command file imports only
typer, `cli.output` and light modules at its top, and the rest (torch, pydantic, YAML) inside the function, so
that `compress --help` stays under 0.4 s.
"""

import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

import compress
from compress.cli import (
    bench,
    compare,
    convert,
    doctor,
    du,
    export_cache,
    gc,
    generate,
    import_cache,
    init,
    inspect,
    plan,
    pull,
    push,
    rollback,
    run,
    schedule,
    schema,
    serve,
    sign,
    validate,
    verify,
)
from compress.cli.failure import failure_of, stopped_by
from compress.cli.output import begin, finish, has_result, leads, show_traceback, write_data
from compress.cli.signals import Termination
from compress.errors import StorageError, Terminated

COMMANDS: dict[str, Callable[..., None]] = {
    "init": init.init,
    "plan": plan.plan,
    "run": run.run,
    "resume": run.resume,
    "validate": validate.validate,
    "compare": compare.compare,
    "generate": generate.generate,
    "serve": serve.serve,
    "bench": bench.bench,
    "inspect": inspect.inspect,
    "convert": convert.convert,
    "sign": sign.sign,
    "push": push.push,
    "rollback": rollback.rollback,
    "pull": pull.pull,
    "verify": verify.verify,
    "du": du.du,
    "gc": gc.gc,
    "export-cache": export_cache.export_cache,
    "import-cache": import_cache.import_cache,
    "doctor": doctor.doctor,
    "schema": schema.schema,
}
GROUPS: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
    "schedule": ("Text for schedulers that run a recipe.", {"render": schedule.render}),
}
"""Commands of two words: the first one, its help, and the functions by the second one."""
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code of the process; errors become one paragraph on stderr and,
    with `--json`, one document on stdout.
    """
    _let_waiting_threads_sleep()
    given = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in given  # taken out here, so that it works before and after the command
    words = [word for word in given if word != "--debug"]
    as_json = "--json" in words
    failure = None
    with Termination() as termination:
        try:
            begin(debug=debug)
            termination.check()
            command = typer.main.get_command(build_app())
            as_json = asks_for_json(words, command)
            code = _called(command, words)
            if code == _INTERRUPTED and not has_result():  # Ctrl-C while the words were read
                raise KeyboardInterrupt
        except (Exception, KeyboardInterrupt, Terminated) as error:  # noqa: BLE001 - a defect becomes a message
            failure = failure_of(error)
            code = failure.exit_code
            if debug:
                show_traceback(error)
        termination.ignore()
        return finish(code, failure, as_json=as_json and leads())


def _called(command: Any, words: list[str]) -> int:
    """Run the command and return its exit code; errors pass through."""
    try:
        code = command(args=words, prog_name="compress", standalone_mode=False)
    except SystemExit as stop:  # of shell completion
        code = stop.code
    return code if isinstance(code, int) else int(code is not None)


def asks_for_json(words: Sequence[str], command: Any) -> bool:
    """Return whether `--json` is among the words as an option: not as the value of one, nor after `--`.

    The words need not be right otherwise, because a usage error is a JSON document too.
    """
    params = command.params
    commands = command.commands
    left = iter(words)
    for word in left:
        if word in ("--json", "--"):
            return word == "--json"
        if not word.startswith("-") and commands is not None:
            params = commands[word].params if word in commands else ()
            commands = getattr(commands.get(word), "commands", None)
        elif any(word in param.opts and not getattr(param, "is_flag", True) for param in params):
            next(left, None)
    return False


def _let_waiting_threads_sleep() -> None:
    """Let a thread of torch that waits for the others soon sleep, before torch is imported.

    GNU's OpenMP spins a hundred times as long by default: faster on quiet processors, much slower on those
    that other programs use too (docs/measuring.md has the numbers). Whoever sets a variable of OpenMP decides
    for themselves.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def build_app() -> typer.Typer:
    """Return the typer application with every command."""
    app = typer.Typer(
        help="One recipe from a Hugging Face checkpoint to a smaller, faster artifact with the proof "
        "attached.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name, command in COMMANDS.items():
        app.command(name)(_with_own_errors(command))
    for name, (text, commands) in GROUPS.items():
        group = typer.Typer(help=text, no_args_is_help=True)
        group.callback()(_no_options)
        for word, command in commands.items():
            group.command(word)(_with_own_errors(command))
        app.add_typer(group, name=name)
    return app


def _no_options() -> None:
    """Do nothing: with a callback, typer keeps the second word of a group of one command."""


def _with_own_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with errors that the parser, which has handlers of its own, lets pass."""

    @functools.wraps(command)
    def call(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except KeyboardInterrupt:
            raise stopped_by(signal.SIGINT) from None
        except BrokenPipeError as error:
            raise StorageError(f"a pipe was closed by its other end: {error.strerror}.") from error

    return call


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=lambda on: _version(on)
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Show where an error came from, and debug logs; works after a command too."
        ),
    ] = False,
) -> None:
    pass


def _version(requested: bool) -> None:
    if requested:
        write_data(f"compress {compress.__version__}")
        raise typer.Exit
