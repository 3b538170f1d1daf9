"""The way in: the command starts light, and what README tells a newcomer to type exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from compress.cli.app import COMMANDS
from tests.support.of_all import of_all
from tests.support.slow import in_part, mark_slow_cases

ROOT = Path(__file__).parents[2]
HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "scipy",
    "datasets",
    "matplotlib",
    "huggingface_hub",
    "accelerate",
    "safetensors",
    "ruamel",
}
PROBE = """
import sys
from compress.cli.app import main
status = main(sys.argv[1:])
print(*sorted(name for name in sys.modules if "." not in name), file=sys.stderr)
sys.exit(status)
"""


def commands_in_readme() -> list[str]:
    """The lines of README's shell blocks, comments and prompts taken off."""
    blocks = re.findall(
        r"^```(?:bash|sh|shell|console)\n(.*?)^```",
        (ROOT / "README.md").read_text(),
        flags=re.MULTILINE | re.DOTALL,
    )
    lines = [
        line.partition(" #")[0].removeprefix("$ ").strip() for block in blocks for line in block.splitlines()
    ]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["inspect", "--help"]], ids=" ".join)
def test_asking_for_help_loads_no_heavy_library(arguments: list[str]) -> None:
    # What the time of `--help` consists of. The time itself is a fact of a machine, so it is not tested here.
    asked = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert asked.returncode == 0, asked.stderr
    assert "compress" in asked.stdout
    assert set(asked.stderr.splitlines()[-1].split()) & HEAVY == set()


def test_readme_names_only_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {
        word
        for line in commands_in_readme()
        for word in re.findall(r"(?:^|&& )make (?:[A-Z_]+=\S+ )*([a-z-]+)", line)
    }
    assert "quickstart" in named
    assert named <= targets


def test_readme_names_only_commands_that_exist() -> None:
    text = "\n".join([*commands_in_readme(), (ROOT / "README.md").read_text()])
    named = set(re.findall(r"(?:^|[/`]|&& )compress ([a-z][a-z-]*)", text, flags=re.MULTILINE))
    assert {"plan", "generate"} <= named
    assert named <= COMMANDS.keys()


def test_each_slow_test_is_in_one_of_the_parts() -> None:
    names = [f"tests/test_some.py::test_{idx}" for idx in range(100)]
    parts = [{name for name in names if in_part(name, f"{part}/4")} for part in range(4)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert all(parts)


class Case:
    """A case of a test as pytest collects it, with its markers."""

    def __init__(self, nodeid: str, *markers: pytest.Mark) -> None:
        self.nodeid = nodeid
        self.markers = {each.name: each for each in markers}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.markers.get(name)

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.markers[marker.name] = marker.mark


def test_of_costly_cases_the_first_and_some_others_stay() -> None:
    def marked(numbers: range) -> list[bool]:
        costly = [Case(f"tests/test_a.py::test_b[{idx}]", pytest.mark.one_in(4).mark) for idx in numbers]
        others = [Case(f"tests/test_a.py::test_c[{idx}]") for idx in numbers]
        mark_slow_cases([*costly, *others])
        assert not any("slow" in each.markers for each in others)
        return ["slow" in each.markers for each in costly]

    cases = [Case(f"tests/test_a.py::test_d[{idx}]", pytest.mark.one_in(1000).mark) for idx in range(3)]
    cases[0].add_marker(pytest.mark.slow)
    mark_slow_cases(cases)
    assert ["slow" in each.markers for each in cases] == [True, False, True]
    slow = marked(range(400))
    assert not slow[0]
    assert 60 < slow.count(False) < 140
    assert marked(range(1, 400))[1:] == slow[2:]


def test_one_test_of_many_values_names_each_that_fails() -> None:
    @of_all([1, 2, 3, 4])
    def test_even(value: int) -> None:
        assert value % 2 == 0

    assert test_even.__name__ == "test_even"
    with pytest.raises(AssertionError, match=r"(?s)1: .*3: ") as caught:
        test_even()
    assert "2: " not in str(caught.value)
