"""Every code block of the documents works: commands run on the bundled model, Python runs, recipes are
checked and planned.

Blocks that need a GPU, a network or minutes are skipped by name; their commands are still parsed.
"""

import ast
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from ruamel.yaml import YAML

from compress.cli.app import build_app, main
from compress.pipeline import build_steps
from compress.recipe import SourceMap, parse_cases, parse_spec
from compress.stages import STAGES
from tests.docs.blocks import PAGES, ROOT, Block, blocks_of, commands_of

EVERY = [block for page in PAGES for block in blocks_of(page)]
CODE = {"sh", "bash", "python", "yaml", "cron"}
PROSE = {"text", "json", ""}
TINY = {
    "version": 1,
    "model": "builtin://reference",
    "stages": [
        {"kind": "calibrate", "num_samples": 4, "seq_len": 64},
        {"kind": "quantize", "scheme": "W4A16_G128", "preset": "fast"},
        {"kind": "export"},
        {"kind": "validate", "num_samples": 2, "seq_len": 32, "latency": None, "speculative": None},
    ],
    "push": {"to": "layout://registry", "name": "reference-w4", "aliases": ["candidate"]},
}
"""What `recipes/quickstart.yaml` is in these tests: the same stages and names, in seconds. It quantizes with
the settings of the Python examples, which then find the result in the workspace.
"""


def named(blocks: list[Block]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", blocks, ids=[block.name for block in blocks])


def of(*languages: str, skipped: bool = False) -> list[Block]:
    return [
        each
        for each in EVERY
        if each.language in languages and (each.skip is not None) == skipped and each.title is None
    ]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the quickstart ran: recipes, data cards, workspace, registry, run directory."""
    root = tmp_path_factory.mktemp("prepared")
    for name in ("calib_data", "benchmarks", "examples", "compress"):
        if (ROOT / name).exists():
            (root / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "recipes", root / "recipes")
    (root / "recipes" / "quickstart.yaml").write_text(json.dumps(TINY))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert main(["run", "recipes/quickstart.yaml"]) == 0
    return root


@pytest.fixture
def place(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory of one page: what was prepared, and the artifact as `./model`."""
    root = tmp_path / "work"
    shutil.copytree(prepared, root, symlinks=True)
    monkeypatch.chdir(root)
    return root


def bring_model(place: Path, text: str) -> None:
    """Put the artifact at `./model`, unless a command makes it there."""
    if "./model" in text and not re.search(r"compress pull \S+ \./model", text):
        shutil.copytree((place / "runs" / "quickstart" / "artifacts" / "export").resolve(), place / "model")


def test_every_block_names_its_language() -> None:
    unknown = [block.name for block in EVERY if block.language not in CODE | PROSE]
    assert unknown == []
    assert [block.name for block in EVERY if block.skip is not None and block.language not in CODE] == []


@named(of("sh", "bash"))
@pytest.mark.one_in(4)
def test_commands_run(block: Block, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bring_model(place, block.text)
    for words in commands_of(block):
        if words[0] == "compress":
            target = redirected(words)
            code = main(words[1:])
            out = capsys.readouterr().out
            if target is not None:
                target.write_text(out)
        elif words[:2] == ["python", "-m"]:
            code = run_module(words[2], words[3:])
        elif words[0] == "openssl":
            if shutil.which("openssl") is None:
                pytest.skip("needs openssl")
            code = subprocess.run(words, capture_output=True, cwd=place).returncode
        else:
            pytest.fail(f"{block.name}: run it, or mark it: {' '.join(words)}")
        assert code == 0, f"{block.name}: {' '.join(words)} ended with exit code {code}"


def run_module(name: str, arguments: list[str]) -> int:
    """Run `python -m NAME ARGUMENTS` in this process, in the current directory, and return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        try:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        except SystemExit as stop:
            return int(stop.code or 0)
    return 0


def redirected(words: list[str]) -> Path | None:
    """Take `> FILE` off a command, and return the file."""
    if ">" not in words:
        return None
    at = words.index(">")
    target = Path(words[at + 1])
    del words[at : at + 2]
    return target


@named(of("python"))
def test_python_runs(block: Block, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bring_model(place, block.text)
    exec(compile(block.text, block.name, "exec"), {"__name__": "__main__"})


@named(of("yaml"))
def test_recipes_are_accepted(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    tree = YAML(typ="safe").load(block.text)
    if isinstance(tree, dict) and "stages" in tree:
        for recipe in parse_cases(block.text, file=block.name):
            build_steps(recipe)
        return
    for raw in tree if isinstance(tree, list) else [tree]:
        settings = {key: value for key, value in raw.items() if key != "kind"}
        parse_spec(STAGES.get(raw["kind"]).spec, settings, SourceMap(file=block.name, positions={}))


def parsed(words: list[str]) -> None:
    """Parse one command of this project without running it: options, arguments, names of programs."""
    while words and "=" in words[0]:
        words = words[1:]
    if words[0] == "torchrun" and "-m" in words:
        words = words[words.index("-m") + 1 :]
    if words[0].endswith("compress"):
        commands: Any = typer.main.get_command(build_app())
        assert words[1] in commands.commands, f"no command {words[1]}"
        commands.commands[words[1]].make_context(words[1], [word for word in words[2:] if word != ">"])
    elif words[:2] == ["python", "-m"]:
        module = ROOT / words[2].replace(".", "/")
        own = words[2].startswith("scripts")
        assert not own or module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()
    elif words[0] == "make":
        targets = (ROOT / "Makefile").read_text()
        for word in words[1:]:
            assert "=" in word or f"\n{word}:" in targets, f"no target {word}"


@named(of(*CODE, skipped=True))
def test_blocks_that_need_more_are_skipped_by_name(block: Block) -> None:
    if block.language == "python":
        ast.parse(block.text)
    elif block.language in ("sh", "bash"):
        for words in commands_of(block):
            parsed(words)
    elif block.language == "yaml":
        YAML(typ="safe").load(block.text)
    pytest.skip(f"{block.name}: {block.skip}")


def cron_commands() -> Iterator[list[str]]:
    for block in of("cron"):
        for line in block.text.splitlines():
            yield line.partition("&& ")[2].removeprefix("{ ").partition(" > ")[0].split()


def test_lines_of_cron_name_commands_that_exist() -> None:
    commands = list(cron_commands())
    assert commands
    for words in commands:
        assert words[0].endswith("/compress")
        parsed(words)
