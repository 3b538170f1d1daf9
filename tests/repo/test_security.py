"""SECURITY.md: each promise names the tests that hold it, and they are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_TEST = re.compile(r"`(tests/[\w/]+\.py)`")


def promises(text: str) -> dict[str, list[str]]:
    """Return the test files of each promise in the table of a text."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: _TEST.findall(row[-1]) for row in rows[1:]}


def unheld(text: str, root: Path) -> list[str]:
    """Return the promises without a test, and the tests that are not there or hold no test."""
    found = []
    for promise, files in promises(text).items():
        if not files:
            found.append(f"no test: {promise}")
        for name in files:
            path = root / name
            if not path.is_file() or "\ndef test_" not in path.read_text(encoding="utf-8"):
                found.append(f"{name}: {promise}")
    return found


def test_each_promise_is_held_by_tests_that_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert len(promises(text)) >= 10
    assert unheld(text, ROOT) == []


def test_the_check_above_sees_what_it_looks_for(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_here.py").write_text("\ndef test_it(): ...\n")
    (tmp_path / "tests" / "test_empty.py").write_text("\n")
    head = "| promise | test that holds it |\n|---|---|\n"
    assert unheld(head + "| a | `tests/test_here.py` |\n", tmp_path) == []
    assert len(unheld(head + "| a | `tests/test_here.py`, `tests/test_gone.py` |\n", tmp_path)) == 1
    assert len(unheld(head + "| a | `tests/test_empty.py` |\n| b | none |\n", tmp_path)) == 2
