"""The examples of `docs/extend.md` are members of their sets: each passes the contract test named there."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.models.family import FAMILIES, Family
from compress.models.family_hooks import nothing_implied, nothing_restated
from tests.docs.blocks import ROOT, blocks_of

PAGE = ROOT / "docs" / "extend.md"
EXAMPLES = [block for block in blocks_of(PAGE) if block.title is not None]
SELECTED = {
    "tests/contract/test_methods_contract.py": "percentile",
    "tests/golden/test_families.py": "hyperclovax",
    "tests/contract/test_kernel_contract.py": "torch.float32",
    "tests/contract/test_formats_contract.py": "int8_rows or Int8Rows",
    "tests/contract/test_registry_contract.py": "shelf",
    "tests/contract/test_schedule_contract.py": "anacron",
}
"""Contract test of each example, and the words that choose its cases."""

SHIPPED = "compress/models/archs/hyperclovax.py"
"""The example that is a file of the package."""


def test_the_page_has_an_example_of_everything_that_is_one_file() -> None:
    places = {"methods", "models", "kernels", "export", "registry", "schedule"}
    assert {Path(block.title).parts[1] for block in EXAMPLES if "tests" not in str(block.title)} == places
    of_package = [block for block in EXAMPLES if "tests" not in str(block.title)]
    shipped = [block for block in of_package if (ROOT / str(block.title)).exists()]
    assert [block.title for block in shipped] == [SHIPPED]
    assert all((ROOT / str(block.title)).read_text(encoding="utf-8") == block.text for block in shipped)


def test_the_page_names_the_tests_that_are_run() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"pytest {test} -k" in text for test in SELECTED)


def own_names_of(family: Family) -> Any:
    """Return what a family has of the row on names of fields, None where it has nothing."""
    if family.implied is nothing_implied and not family.spelled:
        return None
    return family.implied, tuple(sorted(family.spelled.items()))


def restated_of(family: Family) -> Any:
    """Return what a family has of the row on fields that follow from facts, None where it has nothing."""
    return None if family.restated is nothing_restated else family.restated


@pytest.mark.parametrize(
    ("row", "own"), [("| `spelled`, `implied` |", own_names_of), ("| `restated` |", restated_of)]
)
def test_rows_on_fields_of_configs_name_the_families_that_have_them(
    row: str, own: Callable[[Family], Any]
) -> None:
    """A wrapper is named, or a family of which it has them."""
    (line,) = (each for each in PAGE.read_text(encoding="utf-8").splitlines() if each.startswith(row))
    named = set(re.findall(r"[\w-]+", line.split("|")[3]))
    found = {name: own(FAMILIES.get(name)) for name in FAMILIES.names()}
    assert sorted(name for name in named if found.get(name) is None) == []
    covered = {found[name] for name in named}
    assert sorted(name for name, each in found.items() if each is not None and each not in covered) == []


@pytest.mark.slow
def test_every_example_passes_its_contract(tmp_path: Path) -> None:
    modules = []
    for number, block in enumerate(block for block in EXAMPLES if block.title != SHIPPED):
        (tmp_path / f"example_{number}.py").write_text(block.text)
        modules.append(f"import example_{number}")
    (tmp_path / "examples_of_the_page.py").write_text("\n".join(modules) + "\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    plugins = ["-p", "examples_of_the_page", "-p", "no:cacheprovider"]
    words = " or ".join(SELECTED.values())
    command = [sys.executable, "-m", "pytest", "-vv", *plugins, *SELECTED, "-k", words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-2000:]}"
    without = [test for test in SELECTED if f"{test}::" not in done.stdout]
    assert not without, f"no case of the example was chosen in {without}"
