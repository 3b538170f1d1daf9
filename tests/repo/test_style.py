"""Rules of the house that a program can check: formatting, size of files, names, documentation, and what must
never be called.
"""

import ast
import subprocess
import sys
import tokenize
from pathlib import Path

from tests.support.of_all import of_all

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "compress").rglob("*.py"))
MAX_CODE_LINES = 350
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "common", "manager", "base", "misc"}
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}

each_source = of_all(SOURCES, lambda path: path.relative_to(ROOT).as_posix())


def ruff(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ruff", *arguments, "."], cwd=ROOT, capture_output=True, text=True
    )


def code_lines(path: Path) -> int:
    """Lines that hold more than comments, blanks and strings standing alone."""
    with path.open("rb") as stream:
        tokens = [
            each
            for each in tokenize.tokenize(stream.readline)
            if each.type not in NOT_CODE and each.type != tokenize.ENCODING
        ]
    spans = {number for each in tokens for number in range(each.start[0], each.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            spans -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(spans)


def forbidden(tree: ast.AST) -> list[str]:
    """What would run code that came with a checkpoint: pickle in any form, remote code switched on."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) if any(
                alias.name.partition(".")[0] in ("pickle", "dill", "cloudpickle") for alias in names
            ):
                found.append(f"line {node.lineno}: imports pickle")
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in (
                "pickle",
                "dill",
                "cloudpickle",
            ):
                found.append(f"line {node.lineno}: imports pickle")
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                found.append(f"line {node.lineno}: torch.load reads pickles")
            case ast.keyword(arg="trust_remote_code", value=ast.Constant(value=True)):
                found.append(f"line {node.lineno}: trust_remote_code=True")
    return found


def test_ruff_has_nothing_to_say() -> None:
    checked = ruff("check")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_file_is_formatted() -> None:
    checked = ruff("format", "--check")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@each_source
def test_a_file_holds_no_more_than_one_noun(path: Path) -> None:
    with path.open("rb") as stream:
        short = sum(1 for _ in stream) <= MAX_CODE_LINES
    assert short or code_lines(path) <= MAX_CODE_LINES


@each_source
def test_a_file_says_by_its_name_what_is_in_it(path: Path) -> None:
    words = {word for part in path.relative_to(ROOT).with_suffix("").parts for word in part.split("_")}
    assert not words & VAGUE_NAMES


@each_source
def test_nothing_executes_what_came_with_a_checkpoint(path: Path) -> None:
    assert forbidden(ast.parse(path.read_text())) == []


@each_source
def test_a_module_says_what_it_does(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree)


def test_the_checks_above_see_what_they_look_for(tmp_path: Path) -> None:
    bad = (
        "import pickle\nfrom dill import loads\ntorch.load(path)\n"
        "AutoModel.from_pretrained(name, trust_remote_code=True)\n"
    )
    assert len(forbidden(ast.parse(bad))) == 4
    sample = tmp_path / "sample.py"
    sample.write_text(
        '"""Two\nlines."""\n\n# a comment\nx = (\n    1,\n    """a\nb""",\n)\n\n\n'
        'def f():\n    """Said."""\n    return x  # why\n'
    )
    assert code_lines(sample) == 7
