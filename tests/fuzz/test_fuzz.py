"""The law of untrusted input over every kept input and over fresh mutations of them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.campaign import CORPUS, CRASHES, TargetRun, inputs_of, run_targets, scratch
from tests.fuzz.documents import Json, read_pairs
from tests.fuzz.law import judge, warm_up
from tests.fuzz.targets import TARGETS, Target

NUM_MUTATIONS = 60
SLOW_SECONDS = 60.0
EACH_TARGET = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
KEPT = [
    pytest.param(target, path, id=f"{target.name}/{path.name}")
    for folder in (CORPUS, CRASHES)
    for target in TARGETS.values()
    for path in inputs_of(folder, target)
]
LARGE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a long line of a card": ("card", lambda: b"title: " + b"a" * 1_000_000),
    "many keys of a card": ("card", lambda: b"".join(b"k%d: 1\n" % idx for idx in range(80_000))),
    "a long list of a card": ("card", lambda: b"[" + b"1," * 200_000 + b"1]"),
    "many escapes of a recipe": ("recipe", lambda: b'"' + b"\\x41" * 200_000 + b'"'),
    "a deep recipe": ("recipe", lambda: b"[" * 500_000),
    "a tensor of 40,000 dimensions": ("header", lambda: _header({"t": [2**63 - 1] * 40_000})),
    "14,000 tensors": ("header", lambda: _header({f"t{idx}": [0] for idx in range(14_000)})),
    "a deep manifest": ("manifest", lambda: b"[" * 1_000_000),
    "a deep config": ("config", lambda: b'{"a":' * 200_000),
    "a row of a megabyte": ("rows", lambda: b'{"text": "' + b"a" * 1_000_000 + b'"}'),
}
"""Inputs near the size up to which the law holds, by what they are: the target, and the bytes."""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """Yield a directory whose tiny models the targets share, with every target run once."""
    with scratch() as path:
        for target in TARGETS.values():
            for file in inputs_of(CORPUS, target):
                warm_up(target.run, file.read_bytes(), path)
        yield path


def check(target: Target, data: bytes, directory: Path) -> None:
    """Fail, with the traceback of the reader, where an input breaks the law."""
    outcome = judge(target.run, data, directory)
    assert outcome.failure is None, f"{outcome.failure}\n{outcome.trace}\n{data!r:.2000}"


@pytest.mark.parametrize(("target", "path"), KEPT)
def test_a_kept_input_is_read_or_refused(target: Target, path: Path, directory: Path) -> None:
    check(target, path.read_bytes(), directory)


def _header(shapes: dict[str, list[int]]) -> bytes:
    tensors = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()
    }
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize("name", LARGE)
def test_a_large_input_is_read_or_refused_in_time(name: str, directory: Path) -> None:
    target, data = LARGE[name]
    check(TARGETS[target], data(), directory)


@EACH_TARGET
def test_the_seeds_reach_the_end_of_the_reader(target: Target, directory: Path) -> None:
    outcomes = [judge(target.run, path.read_bytes(), directory).key for path in inputs_of(CORPUS, target)]
    assert "returned" in outcomes  # or mutations of them would only test its first lines


@EACH_TARGET
def test_mutations_are_read_or_refused(target: Target, directory: Path) -> None:
    run = TargetRun(target, directory, seed="make test")
    for _ in range(NUM_MUTATIONS):
        check(target, run.next_input(), directory)


@pytest.mark.parametrize(
    "target", [each for each in TARGETS.values() if isinstance(each.form, Json)], ids=lambda each: each.name
)
def test_any_json_in_the_place_of_any_value_is_read_or_refused(target: Target, directory: Path) -> None:
    seed = inputs_of(CORPUS, target)[0].read_bytes()

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data(), JSON)
    def examples(draw: st.DataObject, value: object) -> None:
        document = target.form.value(seed)
        at = draw.draw(st.integers(0, len(document) - 1))
        document[at] = (document[at][0], read_pairs(json.dumps(value)))
        check(target, target.form.text(document).encode("utf-8", "surrogatepass"), directory)

    examples()


@pytest.mark.slow
def test_a_minute_of_mutations_is_read_or_refused() -> None:
    failures = {}
    with scratch() as path:
        for tallies in run_targets(list(TARGETS.values()), path, seed="make test-slow", seconds=SLOW_SECONDS):
            for tally in tallies.values():
                failures |= tally.failures
    assert not failures, "\n\n".join(
        f"{each.target}: {each.reason}\n{each.trace}" for each in failures.values()
    )
