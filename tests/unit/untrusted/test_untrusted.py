"""The doors for untrusted input: limits of JSON, files that are none, and text that a terminal would obey."""

import json
import math
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import StorageError
from compress.untrusted.files import append_text, check_within, open_plain, read_bytes, read_text
from compress.untrusted.parse import MAX_DEPTH, Malformed, parse_json, read_json
from compress.untrusted.pattern import compile_pattern
from compress.untrusted.text import one_line, printable, printable_json
from tests.support.hostile import make_fifo

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(VALUES, st.booleans())
def test_every_ordinary_value_comes_back(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert parse_json(text.encode()) == value
    assert parse_json(text) == value


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "Expecting value"),
        (b"[NaN]", "NaN"),
        (b"[-Infinity]", "Infinity"),
        (b"1e999", "too large"),
        (b"[1e999]", "too large"),
        (b"9" * 5000, "5000 digits"),
        (b'{"a": 1, "a": 2}', "'a' occurs twice"),
        (b'["\\ud800"]', "surrogate"),
        (b'{"\\udc00": 1}', "surrogate"),
        (b"\xff", "byte 0"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested"),
        (b"[" * 200_000 + b"]" * 200_000, "nested"),
        (b'{"a":' * 200_000, "nested"),
    ],
)
def test_what_is_over_a_limit_is_named(data: bytes, reason: str) -> None:
    with pytest.raises(Malformed, match=reason):
        parse_json(data)


def test_a_depth_at_the_limit_passes() -> None:
    assert parse_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)


@pytest.mark.parametrize("reader", [open_plain, lambda path: read_bytes(path, max_bytes=9), read_json])
def test_a_fifo_a_device_and_a_directory_are_refused_at_once(reader, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    os.mkfifo(tmp_path / "fifo")
    began = time.monotonic()
    for path, kind in ((tmp_path / "fifo", "FIFO"), (Path("/dev/zero"), "device"), (tmp_path, "directory")):
        with pytest.raises(StorageError, match=kind):
            reader(path)
    assert time.monotonic() - began < 5  # a reader of a FIFO would wait for ever


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"\xef\xbb\xbfabc")
    assert read_bytes(file, max_bytes=6) == file.read_bytes()
    assert read_text(file, max_bytes=6) == "abc"
    with pytest.raises(StorageError, match="at most 5"):
        read_bytes(file, max_bytes=5)
    file.write_bytes(b"\xe9")
    with pytest.raises(StorageError, match="UTF-8"):
        read_text(file, max_bytes=6)


def test_a_link_may_lead_to_the_blobs_of_its_cache_only(tmp_path: Path) -> None:
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots" / "0"
    (cache / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (cache / "blobs" / "1").write_text("weights")
    (snapshot / "model").symlink_to("../../blobs/1")
    check_within(snapshot, snapshot / "model")
    (snapshot / "secret").symlink_to("/etc/passwd")
    with pytest.raises(StorageError, match="leads out of"):
        check_within(snapshot, snapshot / "secret")
    (tmp_path / "alias").symlink_to(cache)
    check_within(tmp_path / "alias" / "snapshots" / "0", tmp_path / "alias" / "snapshots" / "0" / "model")


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    shown = printable(text)
    shown.encode()
    assert all(char in "\t\n" or (char >= " " and not "\x7f" <= char <= "\x9f") for char in shown)
    assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f")
    assert "\n" not in one_line(text)


@given(VALUES)
def test_json_is_shown_without_a_change_of_its_value(value: object) -> None:
    assert json.loads(printable_json(json.dumps(value, ensure_ascii=False))) == value


def test_ordinary_text_of_any_script_is_unchanged() -> None:
    for text in ("naïve – “quoted”", "日本語", "مرحبا", "👩\u200d🔬", "a\tb\nc"):
        assert printable(text) == text


@pytest.mark.parametrize(
    "text", ["(|.)" * 28 + "X", "(a+)+b", "(ab|cd)*", "(.*)" * 9 + "X", "a" * 2000, "(", "a{2,99999999999}"]
)
def test_a_pattern_that_may_take_long_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^it (has|is)"):
        compile_pattern(text)


@pytest.mark.parametrize(
    "text", [r"model\.layers\.\d+\.mlp\.(gate|up)_proj", r".*lm_head.*", r"^(?!.*mlp).*q_proj$"]
)
def test_a_usual_pattern_passes(text: str) -> None:
    assert compile_pattern(text).pattern == text


def test_python_json_has_the_same_depth() -> None:
    assert math.isinf(parse_json(b"[Infinity]", as_python=True)[0])
    with pytest.raises(Malformed, match="nested more than 64 deep"):
        parse_json(b"[" * 65 + b"]" * 65, as_python=True)


def test_text_is_appended_to_plain_files_only(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append_text(path, "a\n")
    append_text(path, "\udcff\n")
    assert path.read_bytes() == b"a\n\\udcff\n"
    make_fifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(path)
    for name in ("fifo", "link", "."):
        with pytest.raises(StorageError, match="remove it"):
            append_text(tmp_path / name, "b\n")
    assert path.read_bytes() == b"a\n\\udcff\n"
