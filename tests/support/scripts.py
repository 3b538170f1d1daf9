"""Runs a program of `scripts/` in this process, which has imported the libraries already."""

import importlib
import sys

import pytest


def run_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, *arguments: object
) -> str:
    """Run `python -m scripts.<name>` with `arguments` and return what it printed; it must not fail."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    code: object = None
    try:
        code = importlib.import_module(f"scripts.{name}").main()
    except SystemExit as end:
        code = end.code
    assert not code, capsys.readouterr().err
    return capsys.readouterr().out
