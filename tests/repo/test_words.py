"""The language of the code: docstrings that a colleague understands, and one assignment a statement."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "compress").rglob("*.py"))
FRAGMENTS = re.compile(
    r"(Of|Those|As|By|The same|What|Where|Whoever|That|Which|Who|From|With|Behind|Beside|Neither)\b"
)
"""First words of a docstring that is no sentence of its own."""
RIDDLES = re.compile(
    r"\b(stands?|standing|says?|said|knows?|known to|told|tells|behind|beside|together|whoever|meets|"
    r"gives? way|speaks?)\b"
)
"""Words that turn code into a person or a piece of furniture."""
NOT_VERBS = {
    "a",
    "an",
    "the",
    "one",
    "no",
    "none",
    "all",
    "each",
    "every",
    "how",
    "why",
    "whether",
    "when",
    "if",
    "this",
    "it",
    "its",
}


@dataclass(frozen=True)
class Doc:
    """One docstring: where it is, what kind of thing it describes, and its text."""

    path: Path
    line: int
    kind: str
    name: str
    text: str

    def __str__(self) -> str:
        place = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{place}:{self.line} {self.name}: {self.text.splitlines()[0][:90]}"


def docstrings(path: Path) -> Iterator[Doc]:
    """Yield the docstrings of a module, its public and private classes and functions, and its attributes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield Doc(
                    path, getattr(node, "lineno", 1), _kind(node), getattr(node, "name", path.stem), text
                )
        for body in (getattr(node, "body", ()),):
            for before, here in zip(body, body[1:], strict=False) if isinstance(body, list) else ():
                if (
                    isinstance(before, ast.Assign | ast.AnnAssign)
                    and isinstance(here, ast.Expr)
                    and isinstance(here.value, ast.Constant)
                    and isinstance(here.value.value, str)
                ):
                    yield Doc(
                        path,
                        here.lineno,
                        "attribute",
                        ast.unparse(before).partition(" ")[0],
                        here.value.value,
                    )


def _kind(node: ast.AST) -> str:
    if isinstance(node, ast.Module):
        return "module"
    if isinstance(node, ast.ClassDef):
        return "class"
    decorators = {
        ast.unparse(each).rpartition(".")[2]
        for each in node.decorator_list  # type: ignore[attr-defined]
    }
    return "property" if decorators & {"property", "cached_property"} else "function"


def fragments(docs: list[Doc]) -> list[str]:
    """Return the docstrings that open with a word no sentence of ours opens with."""
    return [str(doc) for doc in docs if FRAGMENTS.match(doc.text)]


def riddles(docs: list[Doc]) -> list[str]:
    """Return the docstrings that describe code as somebody who speaks or something that stands."""
    return [f"{doc} [{found[0]}]" for doc in docs if (found := RIDDLES.search(doc.text))]


def nouns(docs: list[Doc]) -> list[str]:
    """Return the docstrings of functions whose first word is no verb: it must name what they do."""
    found = []
    for doc in docs:
        if doc.kind == "function":
            word = doc.text.split()[0].strip(".,:;`'\"").lower()
            if word in NOT_VERBS or (word.endswith("s") and not word.endswith("ss")) or not word.isalpha():
                found.append(str(doc))
    return found


def pairs(path: Path) -> list[str]:
    """Return the assignments of a tuple to a tuple, except those that exchange values."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Tuple)
            and isinstance(node.targets[0], ast.Tuple)
        ):
            targets = {ast.unparse(each) for each in node.targets[0].elts}
            read = {
                ast.unparse(each)
                for each in ast.walk(node.value)
                if isinstance(each, ast.Name | ast.Attribute | ast.Subscript)
            }
            if not targets & read:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)[:90]}")
    return found


@pytest.fixture(scope="module")
def docs() -> list[Doc]:
    return [doc for path in SOURCES for doc in docstrings(path)]


def test_no_docstring_is_a_fragment(docs: list[Doc]) -> None:
    assert fragments(docs) == []


def test_no_docstring_is_a_riddle(docs: list[Doc]) -> None:
    assert riddles(docs) == []


def test_the_docstring_of_a_function_opens_with_its_verb(docs: list[Doc]) -> None:
    assert nouns(docs) == []


def test_unrelated_things_are_assigned_one_by_one() -> None:
    assert [each for path in SOURCES for each in pairs(path)] == []


def test_the_checks_above_see_what_they_look_for(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        '"""Of a thing that stands behind another."""\n\n\n'
        'def rows():\n    """The rows of it."""\n\n\nX = 1\n"""Those it knows."""\n'
    )
    found = list(docstrings(bad))
    assert {doc.kind for doc in found} == {"module", "function", "attribute"}
    assert len(fragments(found)) == 2
    assert len(riddles(found)) == 2
    assert len(nouns(found)) == 1
