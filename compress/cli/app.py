"""The `compress` command: which commands there are, and what becomes of an error.

To add a command, write one file that defines one function, and one line below. A command file imports only
typer, `cli.output` and light modules at its top, and the rest (torch, pydantic, YAML) inside the function, so
that `compress --help` stays under 0.4 s.
"""

import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

import compress
from compress.cli import (
    convert,
    doctor,
    generate,
    init,
    inspect,
    plan,
    pull,
    push,
    run,
    schema,
    validate,
    verify,
)
from compress.errors import CompressError, StorageError

COMMANDS: dict[str, Callable[..., None]] = {
    "init": init.init,
    "plan": plan.plan,
    "run": run.run,
    "resume": run.resume,
    "validate": validate.validate,
    "generate": generate.generate,
    "inspect": inspect.inspect,
    "convert": convert.convert,
    "push": push.push,
    "pull": pull.pull,
    "verify": verify.verify,
    "doctor": doctor.doctor,
    "schema": schema.schema,
}
_INTERRUPTED = 130
_INPUT_OUTPUT = StorageError.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code of the process; errors become one paragraph on stderr."""
    _let_waiting_threads_sleep()
    given = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in given  # taken out here, so that it works before and after the command
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("compress").setLevel(
        logging.DEBUG if debug else logging.WARNING
    )  # other libraries' debug logs drown ours
    try:
        typer.main.get_command(build_app())(
            args=[word for word in given if word != "--debug"], prog_name="compress"
        )
    except SystemExit as stop:  # how typer ends a command, usage errors (2) and Ctrl-C (130) included
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except CompressError as error:
        return _fail(error, str(error), error.exit_code, debug=debug)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(error, f"{where}{error.strerror or error}", _INPUT_OUTPUT, debug=debug)
    except Exception as error:  # noqa: BLE001 - the one place where a defect becomes a message
        lines = str(error).strip().splitlines()
        summary = f"internal error: {type(error).__name__}{': ' + lines[0] if lines else ''}"
        return _fail(
            error, summary if debug else f"{summary} (run again with --debug to see where)", 1, debug=debug
        )
    return 0


def _let_waiting_threads_sleep() -> None:
    """Let a thread of torch that waits for the others sleep after some 0.2 ms, before torch is imported.

    GNU's OpenMP spins for 20 ms by default. On two processors that other programs use too, that made a run of
    the quickstart two to four times as long; on quiet ones a short wait costs a decode step 4 %. Whoever sets
    a variable of OpenMP decides for themselves.
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
        app.command(name)(command)
    return app


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
        print(f"compress {compress.__version__}")
        raise typer.Exit


def _fail(error: BaseException, message: str, exit_code: int, *, debug: bool) -> int:
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    print(f"compress: {message}", file=sys.stderr)
    return exit_code
