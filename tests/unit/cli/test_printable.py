"""What somebody else wrote is shown and never obeyed: escapes, C1 controls and bidirectional overrides in
names, facts, tags, errors, logs, progress and generated text.
"""

import io
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import compress.api
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from compress.cli import app as app_module
from compress.cli.app import main
from compress.cli.output import PrintableFormatter, begin, progress, table
from compress.errors import StorageError

EVIL = "a\x1b]0;title\x07\x9b31m\u202eb\u2066"
SHOWN = r"a\x1b]0;title\x07\x9b31m\u202eb\u2066"
JSON_SHOWN = r"a\u001b]0;title\u0007\u009b31m\u202eb\u2066"
OBEYED = "\x1b\x07\x9b\u202e\u2066\r"


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """An artifact with such text in its facts and in its role."""

    def build(out: ArtifactWriter) -> None:
        (out.path / "a.txt").write_text("x")
        out.describe(
            role=EVIL, layers=[{EVIL: EVIL}], scheme={"name": EVIL}, facts={EVIL: EVIL, "list": [EVIL]}
        )

    return Workspace(tmp_path / "workspace").commit("k" * 8, "export", {"model": "0"}, build).path


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command; nothing that a terminal obeys may be in its output."""

    def call(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(each) for each in argv])
        out, err = capsys.readouterr()
        assert not set(out + err) & set(OBEYED)
        return code, out, err

    return call


Shown = Callable[..., tuple[int, str, str]]


def test_inspect_shows_names_and_facts_as_escapes(artifact: Path, shown: Shown) -> None:
    code, out, _ = shown("inspect", artifact, "--tensors")
    assert code == 0
    assert out.count(SHOWN) >= 5
    code, out, _ = shown("inspect", artifact, "--json")
    assert JSON_SHOWN in out
    assert json.loads(out)["manifest"]["role"] == EVIL, "the value is the same"


def test_push_pull_and_verify_show_a_registry_and_its_tags_as_escapes(
    artifact: Path, tmp_path: Path, shown: Shown
) -> None:
    assert SHOWN in shown("push", artifact, f"layout://{tmp_path}/r{EVIL}/m:t")[2]
    registry = tmp_path / "registry"
    ref = f"layout://{registry}/m:t"
    assert shown("push", artifact, ref)[0] == shown("verify", ref)[0] == 0
    for argv in (
        ("inspect", ref),
        ("pull", ref, tmp_path / f"to{EVIL}"),
        ("verify", tmp_path / f"to{EVIL}"),
    ):
        code, out, err = shown(*argv)
        assert code == 0, err
        assert SHOWN in out
    assert shown("pull", ref, tmp_path / f"again{EVIL}", "--json")[0] == 0
    index = registry / "index.json"
    index.write_text(index.read_text().replace('"m:t"', json.dumps(f"m:t{EVIL}")))
    assert shown("pull", f"layout://{registry}/m:tt", tmp_path / "no")[0] == 2


def test_errors_show_names_as_escapes(artifact: Path, tmp_path: Path, shown: Shown) -> None:
    code, _, err = shown("inspect", f"{tmp_path}/{EVIL}")
    assert code == 2
    assert SHOWN in err
    code, _, err = shown("inspect", "x", f"--{EVIL}")
    assert code == 2
    copy = tmp_path / "copy"
    shutil.copytree(artifact, copy)
    (copy / f"{EVIL}.txt").write_text("y")
    code, _, err = shown("verify", copy)
    assert code == 5
    assert SHOWN in err


@pytest.mark.parametrize(
    "error", [StorageError(EVIL), ZeroDivisionError(EVIL), FileNotFoundError(2, EVIL, EVIL), OSError(EVIL)]
)
def test_an_error_and_its_traceback_are_printable(
    error: Exception, monkeypatch: pytest.MonkeyPatch, shown: Shown
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setitem(app_module.COMMANDS, "fail", fail)
    assert SHOWN in shown("fail")[2]
    assert SHOWN in shown("fail", "--debug")[2]


def test_generated_text_is_printable_and_whole_as_json(monkeypatch: pytest.MonkeyPatch, shown: Shown) -> None:
    timing = SimpleNamespace(ttft_ms=1.0, tpot_ms=1.0)
    output = SimpleNamespace(
        text=EVIL,
        token_ids=(1, 2),
        finish_reason="stop",
        num_prompt_tokens=1,
        timing=timing,
        tokens_per_s=1.0,
    )

    class Stream(list[str]):
        output: Any = None

    stream = Stream([EVIL[:3], EVIL[3:]])
    stream.output = output
    llm = SimpleNamespace(stream=lambda *_: stream, acceptance=None)
    monkeypatch.setattr(compress.api, "load", lambda *_, **__: llm)
    assert shown("generate", "m", "p")[1] == SHOWN + "\n"
    code, out, _ = shown("generate", "m", "p", "--json")
    assert code == 0
    assert json.loads(out)["text"] == EVIL


def test_a_cell_of_a_table_is_one_printable_line() -> None:
    assert table([("name\nfake", EVIL)]) == rf"name\nfake  {SHOWN}"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_printable_with_and_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = io.StringIO()
    with progress("stage", stream=lines, peak_bytes=lambda: 1) as report:
        report.update(1, 1, EVIL)
        report.log(EVIL)
    assert lines.getvalue().count(SHOWN) == 2
    assert not set(lines.getvalue()) & set(OBEYED)

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    terminal = Terminal()
    with progress("stage", stream=terminal, peak_bytes=lambda: 1) as report:
        report.update(1, 2, f"[/red]{EVIL}")  # no markup either
        report.log(f"[bold]{EVIL}")
    assert f"[/red]{SHOWN}" in terminal.getvalue()
    assert f"[bold]{SHOWN}" in terminal.getvalue()
    assert "\x1b]0;title" not in terminal.getvalue()
    assert "\u202e" not in terminal.getvalue()


def test_logs_of_libraries_and_warnings_are_printable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    begin(debug=False)
    assert [type(each.formatter) for each in root.handlers] == [PrintableFormatter]
    logging.getLogger("library").warning("name %s", EVIL)
    try:
        raise ValueError(EVIL)
    except ValueError:
        logging.getLogger("library").exception("failed")
    logging.getLogger("py.warnings").warning(EVIL)  # where `captureWarnings` sends them
    err = capsys.readouterr().err
    assert err.count(SHOWN) >= 3
    assert not set(err) & set(OBEYED)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_stdout_that_holds_ascii_alone_gets_other_characters_as_escapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    def build(out: ArtifactWriter) -> None:
        out.describe(role="dense", layers=[], scheme={"name": "é"}, facts={"名": "é"})

    path = Workspace(tmp_path / "workspace").commit("k" * 8, "export", {"model": "0"}, build).path
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["inspect", str(path), *(["--json"] if as_json else [])]) == 0
    shown = raw.getvalue().decode("ascii")
    if as_json:
        assert '"名": "é"' in json.dumps(json.loads(shown), ensure_ascii=False)
    else:
        assert {r"\u540d", r"\xe9"} <= set(shown.split())
