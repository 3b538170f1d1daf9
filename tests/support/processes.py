"""Runs in processes of their own, forked from one that has imported the libraries: they start in a tenth of a
second, where a new interpreter takes three or four.

They share nothing with the tests but files. One thread of torch has computed nothing yet when they are
forked.
"""

import atexit
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 120.0
MAIN = "import sys; from compress.cli.app import main; sys.exit(main(sys.argv[1:]))"
LIBRARIES = (
    "compress.cli.app",
    "compress.stages.calibrate",
    "compress.stages.distill",
    "compress.stages.draft",
    "compress.stages.export",
    "compress.stages.prune",
    "compress.stages.quantize",
    "compress.stages.validate",
    "compress.registry.layout",
    "torch.distributed",
)
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__, *LIBRARIES])


@dataclass(frozen=True)
class Ended:
    """How a process ended: as `subprocess.CompletedProcess` has it, minus the signal if one killed it."""

    returncode: int
    stdout: str
    stderr: str


def run_each(
    environs: Sequence[Mapping[str, str]], *argv: object, code: str = MAIN, timeout_s: float = TIMEOUT_S
) -> list[Ended]:
    """Run `code` with `argv` after the program's name, once for every environment added to this one's, all at
    the same time, in the current directory.

    A process that takes longer than `timeout_s` is killed.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        processes = []
        for idx, environ in enumerate(environs):
            arguments = (code, [str(each) for each in argv], {**os.environ, **environ}, os.getcwd())
            process = _CONTEXT.Process(target=_become, args=(*arguments, directory / f"{idx}"))
            process.start()
            processes.append(process)
        ended = []
        for idx, process in enumerate(processes):
            process.join(timeout_s)
            process.kill()
            process.join()
            assert process.exitcode is not None
            texts = [(directory / f"{idx}.{stream}").read_text() for stream in ("out", "err")]
            ended.append(Ended(process.exitcode, *texts))
        return ended


def run_alone(*argv: object, code: str = MAIN) -> Ended:
    """Run `code` in one process."""
    (ended,) = run_each([{}], *argv, code=code)
    return ended


def _become(code: str, argv: list[str], environ: dict[str, str], directory: str, streams: Path) -> None:
    for number, suffix in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{streams}.{suffix}", os.O_CREAT | os.O_WRONLY), number)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["-c", *argv]
    try:
        exec(compile(code, "<test>", "exec"), {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()  # which a forked process leaves out
