"""The fuzzer itself: the law catches what breaks it, mutations repeat, and failing inputs become small."""

import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import GateFailed, StorageError, UsageError
from tests.fuzz.__main__ import main
from tests.fuzz.campaign import CORPUS, CRASHES, Failure, TargetRun, inputs_of, run_targets, store
from tests.fuzz.documents import MAX_BYTES, Json, Pairs, read_pairs, write
from tests.fuzz.law import MAX_MORE_BYTES, judge
from tests.fuzz.minimise import minimise
from tests.fuzz.targets import TARGETS, Target

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters()), inner, max_size=4),
    max_leaves=20,
)
EACH_TARGET = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)


class Panic(BaseException):
    """What a library in Rust raises."""


def reader(data: bytes, directory: Path) -> None:
    """Break the law in the way that the input names."""
    match data:
        case b"usage":
            raise UsageError("The input is wrong.")
        case b"storage":
            raise StorageError("The input is damaged.")
        case b"gate":
            raise GateFailed("A gate.")
        case b"mute":
            raise UsageError("")
        case b"panic":
            raise Panic("out of range")
        case b"sleep":
            time.sleep(30)
        case b"memory":
            bytearray(MAX_MORE_BYTES + (64 << 20))
        case _ if b"key" in data:
            json.loads(data)["missing"]


@pytest.mark.parametrize("data", [b"fine", b"usage", b"storage"])
def test_a_result_and_the_right_errors_pass(data: bytes, tmp_path: Path) -> None:
    assert judge(reader, data, tmp_path).failure is None


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"gate", "exit code 3"),
        (b"mute", "without a message"),
        (b"panic", "Panic"),
        (b"memory", "MemoryError"),
        (b'{"key": 1}', "KeyError"),
    ],
)
def test_anything_else_breaks_the_law(data: bytes, reason: str, tmp_path: Path) -> None:
    outcome = judge(reader, data, tmp_path)
    assert reason in str(outcome.failure)
    assert "test_engine.py" in outcome.trace


def test_a_reader_that_waits_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.law.MAX_SECONDS", 0.1)
    began = time.monotonic()
    assert "more than" in str(judge(reader, b"sleep", tmp_path).failure)
    assert time.monotonic() - began < 5


@given(VALUES)
def test_json_is_written_as_it_was_read(value: object) -> None:
    text = write(read_pairs(json.dumps(value)))
    assert json.loads(text) == value


def test_canonical_json_has_the_bytes_of_a_manifest() -> None:
    form = TARGETS["manifest"].form
    assert isinstance(form, Json)
    for path in inputs_of(CORPUS, TARGETS["manifest"]):
        assert form.text(form.value(path.read_bytes())).encode() == path.read_bytes()


@EACH_TARGET
def test_mutations_repeat_and_are_below_the_size_of_the_law(target: Target) -> None:
    pool = [path.read_bytes() for path in inputs_of(CORPUS, target)]

    def inputs(seed: int) -> list[bytes]:
        rng = random.Random(seed)
        return [target.form.mutate(rng.choice(pool), pool, rng) for _ in range(40)]

    first = inputs(1)
    assert first == inputs(1)
    assert len(set(first)) > 20
    assert set(first) != set(inputs(2))
    assert all(len(each) <= MAX_BYTES for each in first)


def test_a_failing_input_becomes_small(tmp_path: Path) -> None:
    document = {"a": [1, {"b": 2}], "key": {"c": ["long" * 50]}, "d": None}
    small = minimise(json.dumps(document).encode(), Json(), lambda data: b"key" in data, seconds=5)
    assert json.loads(small) == {"key": {}}


def test_a_failure_is_found_kept_and_named(tmp_path: Path) -> None:
    target = Target("chat", reader, Json(), ".json")
    (tmp_path / "corpus" / "chat").mkdir(parents=True)
    (tmp_path / "corpus" / "chat" / "seed.json").write_text('{"key": [1, 2, 3], "other": 1}')
    run = TargetRun(target, tmp_path, seed="0", corpus=tmp_path / "corpus")
    for _ in range(20):
        run.step(run.next_input())
    (failure, *_) = [each for each in run.tally.failures.values() if each.key == "KeyError"]
    path = store(failure, tmp_path / "crashes")
    assert path.name.startswith("KeyError-")
    assert b"key" in path.read_bytes()
    assert len(path.read_bytes()) <= len('{"key": []}')
    assert "missing" in path.with_name(path.name + ".trace").read_text()


def test_targets_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.campaign.SLICE_SECONDS", 0.05)
    targets = [TARGETS["header"], TARGETS["card"]]
    seen: dict[str, int] = {}
    for tallies in run_targets(targets, tmp_path, seed="0", seconds=60.0):
        seen |= {name: tally.inputs for name, tally in tallies.items()}
        if len(seen) == 2 and all(seen.values()):
            break
    assert set(seen) == {"header", "card"}
    assert all(seen.values())


@pytest.mark.slow
def test_a_campaign_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    code = main(
        [
            "--seconds",
            "2",
            "--jobs",
            "1",
            "--target",
            "header",
            "--out",
            str(out),
            "--crashes",
            str(tmp_path),
        ]
    )
    found = json.loads(out.read_text())
    assert code == bool(found["failures"])
    assert found["environment"]["device_key"] == "cpu"
    assert found["targets"]["header"]["inputs"] == found["inputs"] > 0
    assert "inputs/s" in capsys.readouterr().out


def test_a_name_tells_the_error_and_the_place() -> None:
    failure = Failure("chat", "KeyError data/chat.py:_read_json:188", "", "", b"{}")
    assert failure.file_name == "KeyError-data-chat-read-json-44136fa3.json"


def test_every_folder_of_inputs_has_its_target() -> None:
    for folder in (CORPUS, CRASHES):
        for path in folder.glob("*/*"):
            if path.suffix != ".trace":
                assert path in inputs_of(folder, TARGETS[path.parent.name])
                assert len(path.read_bytes()) <= MAX_BYTES


def test_pairs_keep_a_name_that_occurs_twice() -> None:
    assert write(read_pairs('{"a": 1, "a": [2]}')) == '{"a": 1, "a": [2]}'
    assert isinstance(read_pairs("{}"), Pairs)
