"""A tiny model with a tokenizer, and recipes over it: whole runs in seconds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_svg import FigureCanvasSVG

from compress.cli.app import main
from tests.support.tiny_model import write_tiny_model
from tests.support.tiny_run import RECIPE


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the pictures of reports empty: drawing is much of a run of the tiny model, and
    tests/unit/validate draws every picture."""
    monkeypatch.setattr(
        FigureCanvasSVG, "print_svg", lambda self, stream, **facts: stream.write("<svg ></svg>")
    )


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def recipe(model_dir: Path, work: Path) -> Callable[..., Path]:
    """Writes the recipe with changes at its top level; JSON is YAML."""

    def write(name: str = "recipe.yaml", **changes: Any) -> Path:
        path = work / name
        path.write_text(json.dumps({**RECIPE, "model": str(model_dir), **changes}))
        return path

    return write


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the CLI in this process: (exit code, stdout, stderr)."""

    def call(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(each) for each in argv])
        out, err = capsys.readouterr()
        return code, out, err

    return call
