"""The `--json` document of every outcome. Its keys are frozen: they change with a major version only."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

import compress.cli.doctor as doctor
from compress.artifact.atomic import write_atomic
from compress.cli import app as app_module
from compress.cli.app import main
from compress.cli.failure import failure_of
from compress.cli.output import JsonFlag, emit
from compress.errors import (
    CompressError,
    EnvironmentUnfit,
    GateFailed,
    Interrupted,
    LockHeld,
    RankStopped,
    RecipeError,
    StorageError,
    Terminated,
    UnsupportedArch,
    UnsupportedFormat,
    UsageError,
)
from compress.registry.resuming import Dropped

FROZEN = ["schema", "status", "exit_code", "error"]
FROZEN_ERROR = ["kind", "message", "where", "hint"]
Outcome = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def outcome(capsys: pytest.CaptureFixture[str]) -> Outcome:
    """Run a command: (exit code, the one document on stdout, stderr)."""

    def call(*argv: object) -> tuple[int, dict[str, Any], str]:
        capsys.readouterr()
        code = main([str(each) for each in argv])
        out, err = capsys.readouterr()
        document: dict[str, Any] = json.loads(out)  # two documents are no JSON
        assert document["schema"] == 1
        assert document["exit_code"] == code
        return code, document, err

    return call


def fails_with(monkeypatch: pytest.MonkeyPatch, error: BaseException, *, after_a_result: bool) -> None:
    """Register a command `fail`."""

    def fail(as_json: JsonFlag = False) -> None:
        if after_a_result:
            emit({"answer": 42}, "42", as_json=as_json)
        raise error

    monkeypatch.setitem(app_module.COMMANDS, "fail", fail)


ERRORS = [
    (UsageError("what."), 2, "UsageError"),
    (UnsupportedArch("what."), 2, "UnsupportedArch"),
    (UnsupportedFormat("what."), 2, "UnsupportedFormat"),
    (GateFailed("what."), 3, "GateFailed"),
    (EnvironmentUnfit("what."), 4, "EnvironmentUnfit"),
    (StorageError("what."), 5, "StorageError"),
    (Dropped("what."), 5, "StorageError"),
    (PermissionError(13, "what", "name"), 5, "OSError"),
    (OSError("what"), 5, "OSError"),
    (LockHeld("what."), 75, "LockHeld"),
    (Interrupted("what.", signal_number=2), 130, "Interrupted"),
    (KeyboardInterrupt(), 130, "Interrupted"),
    (Terminated(), 143, "Interrupted"),
    (RankStopped("what.", exit_code=4), 4, "RankStopped"),
    (CompressError("what."), 1, "CompressError"),
    (ZeroDivisionError("what"), 1, "ZeroDivisionError"),
    (ZeroDivisionError(), 1, "ZeroDivisionError"),
]


@pytest.mark.parametrize("after_a_result", [False, True], ids=["at once", "after a result"])
@pytest.mark.parametrize(("error", "exit_code", "kind"), ERRORS, ids=[repr(each[0]) for each in ERRORS])
def test_an_error_is_one_document_of_frozen_keys(
    error: BaseException,
    exit_code: int,
    kind: str,
    after_a_result: bool,
    outcome: Outcome,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fails_with(monkeypatch, error, after_a_result=after_a_result)
    code, document, err = outcome("fail", "--json")
    assert code == exit_code
    assert list(document) == FROZEN
    assert list(document["error"]) == FROZEN_ERROR
    assert document["status"] == "error"
    assert document["error"]["kind"] == kind
    assert document["error"]["message"].endswith(".")
    assert document["error"]["message"] in err, "people read it too"


def test_the_documentation_has_these_keys() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operate.md").read_text(encoding="utf-8")
    document = json.loads(page.partition("```json\n")[2].partition("```")[0])
    assert list(document) == FROZEN
    assert list(document["error"]) == FROZEN_ERROR


@pytest.mark.parametrize(
    "argv",
    [
        ["inspcet", "--json"],
        ["inspect", "--json"],
        ["inspect", "x", "--jsn", "--json"],
        ["--json", "inspect", "x", "--jsn"],
        ["plan", "x", "--ranks", "0", "--json"],
        ["plan", "x", "--ranks", "--json", "--json"],
        ["init", "--json"],
    ],
)
def test_a_usage_error_is_a_document_wherever_the_flag_is(argv: list[str], outcome: Outcome) -> None:
    code, document, err = outcome(*argv)
    assert code == 2
    assert document["error"]["kind"] == "UsageError"
    assert "--help" in document["error"]["hint"]
    assert document["error"]["message"] in err


@pytest.mark.parametrize(
    ("argv", "where"),
    [
        (["inspect", "--json"], "TARGET"),
        (["inspect", "x", "--jsn", "--json"], "--jsn"),
        (["plan", "x", "--ranks", "0", "--json"], "--ranks"),
    ],
)
def test_a_usage_error_names_the_option(argv: list[str], where: str, outcome: Outcome) -> None:
    assert outcome(*argv)[1]["error"]["where"] == where


@pytest.mark.parametrize(
    "argv",
    [
        ["inspect", "x", "--", "--json"],
        ["convert", "x", "--to", "gptq", "--out", "--json"],
        ["inspect", "x"],
        ["inspcet"],
        [],
    ],
)
def test_without_the_flag_there_is_no_document(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert '"schema"' not in capsys.readouterr().out


def test_a_result_keeps_its_keys_and_gets_status_and_exit_code(
    outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    def works(status: Annotated[str, typer.Option("--status")] = "", as_json: JsonFlag = False) -> None:
        emit({"answer": 42, **({"status": status} if status else {})}, "42", as_json=as_json)

    monkeypatch.setitem(app_module.COMMANDS, "works", works)
    assert outcome("works", "--json")[1] == {"schema": 1, "status": "done", "answer": 42, "exit_code": 0}
    assert outcome("works", "--json", "--status", "unchanged")[1]["status"] == "unchanged"


def test_a_result_with_a_failure_has_both(outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = doctor.installed_version
    monkeypatch.setattr(
        doctor, "installed_version", lambda name: None if name == "safetensors" else installed(name)
    )
    code, document, err = outcome("doctor", "--json")
    assert code == 4
    assert document["status"] == "unfit"
    assert document["fit"] is False
    assert document["error"]["kind"] == "EnvironmentUnfit"
    assert "safetensors" in document["error"]["message"]
    assert "pip install" in document["error"]["hint"]
    assert document["error"]["message"] in err


def test_where_is_the_place_in_the_recipe(tmp_path: Path, outcome: Outcome) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("version: 1\nmodel: builtin://reference\nstages:\n  - kind: quantise\n")
    code, document, _ = outcome("run", recipe, "--json")
    assert code == 2
    assert document["error"]["kind"] == "RecipeError"
    assert document["error"]["where"] == f"{recipe}:4:5"


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ("dir with space/r.yaml:4:22: stages: unknown", "dir with space/r.yaml:4:22"),
        ("r.yaml: push: 4:2", None),
        ("no position at all", None),
    ],
)
def test_a_recipe_error_knows_its_position(message: str, where: str | None) -> None:
    assert RecipeError(message).where == where
    assert RecipeError(message, where="x").where == "x"


def test_a_directory_in_the_place_of_a_file_is_named_and_not_the_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError) as found:
        write_atomic(tmp_path / "taken", b"new")
    failure = failure_of(found.value)
    assert failure.where == str(tmp_path / "taken")
    assert failure.message == f"{tmp_path / 'taken'}: Is a directory."
    assert failure.hint == "A directory has this name: move it, or name another place."


def test_a_hint_is_part_of_the_sentence_for_people() -> None:
    error = StorageError("the disk is full.", where=Path("/a"), hint="Free space.")
    assert str(error) == "the disk is full. Free space."
    assert (error.message, error.where, error.hint) == ("the disk is full.", "/a", "Free space.")


def test_a_value_that_is_not_json_is_an_error_document(
    outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    def odd(as_json: JsonFlag = False) -> None:
        emit({"answer": float("nan")}, "", as_json=as_json)

    monkeypatch.setitem(app_module.COMMANDS, "odd", odd)
    code, document, _ = outcome("odd", "--json")
    assert (code, document["error"]["kind"]) == (1, "ValueError")


def test_only_rank_0_prints_a_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails_with(monkeypatch, UsageError("what."), after_a_result=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(["fail", "--json"]) == 2
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    assert main(["fail", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


def test_a_full_disk_under_stdout_is_5_and_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "compress", "inspect", "nowhere", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 5
    assert done.stderr.splitlines()[-1] == "compress: stdout cannot be written: No space left on device."
    assert "Traceback" not in done.stderr


# -------------------------------------------------------------------------------------------------------
# signals


def test_sigterm_ends_any_command_in_order(
    tmp_path: Path, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaned = tmp_path / "cleaned"

    def waits(as_json: JsonFlag = False) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Exception:  # noqa: BLE001 - a handler of errors must not take it
            return
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # the second one does not disturb the cleaning up
            cleaned.touch()

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setitem(app_module.COMMANDS, "waits", waits)
    code, document, err = outcome("waits", "--json")
    assert code == 143
    assert document["error"]["kind"] == "Interrupted"
    assert "SIGTERM" in document["error"]["message"]
    assert len(err.splitlines()) == 1
    assert cleaned.exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_caller_that_ignores_sigterm_is_left_alone(
    outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(as_json: JsonFlag = False) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        emit({}, "", as_json=as_json)

    monkeypatch.setitem(app_module.COMMANDS, "waits", waits)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert outcome("waits", "--json")[0] == 0
    finally:
        signal.signal(signal.SIGTERM, before)


DURING_IMPORTS = """
import os, signal, sys
sys.argv[1:] = ["inspect", "nowhere", "--json"]
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Finder())
from compress.cli.start import main
sys.exit(main())
"""


def test_sigterm_during_the_imports_is_a_document_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DURING_IMPORTS], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 143
    assert json.loads(done.stdout)["exit_code"] == 143
    assert done.stderr.startswith("compress: stopped by SIGTERM")
    assert len(done.stderr.splitlines()) == 1


def test_sigint_during_the_imports_is_a_document_too() -> None:
    code = DURING_IMPORTS.replace("SIGTERM", "SIGINT")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == json.loads(done.stdout)["exit_code"] == 130
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_document_changes_no_exit_code(number: signal.Signals) -> None:
    code = (
        f"import atexit, os, sys\natexit.register(lambda: os.kill(os.getpid(), {number:d}))\n"
        "sys.argv[1:] = ['inspect', 'nowhere', '--json']\n"
        "from compress.cli.start import main\nsys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == json.loads(done.stdout)["exit_code"] == 2


def test_a_closed_stderr_leaves_stdout_to_the_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    code = main(["verify", "nowhere", "--json"])
    assert json.loads(capsys.readouterr().out)["exit_code"] == code == 2
