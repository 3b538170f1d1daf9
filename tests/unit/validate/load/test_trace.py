"""Traces are read in three spellings; a malformed row is refused by one sentence with its line."""

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.errors import UsageError
from compress.validate.load.sweep import trace_sweep
from compress.validate.load.trace import read_trace

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
    "2023-11-16 18:15:51.2224670,879,55\n"
)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_azure_columns_are_read_as_they_are(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "azure.csv", AZURE))
    assert trace.arrivals_s == pytest.approx([0.0, 4.314579, 4.541877], abs=1e-6)
    assert trace.lengths.prompt_tokens == (374, 396, 879)
    assert trace.lengths.output_tokens == (44, 109, 55)
    assert trace.lengths.longest == 934


def test_own_columns_and_json_lines_give_the_same(tmp_path: Path) -> None:
    csv = write(tmp_path / "a.csv", "output_tokens,timestamp,prompt_tokens,user\n2,10.5,7,x\n3,11,8,y\n")
    lines = '{"timestamp": 10.5, "prompt_tokens": 7, "output_tokens": 2}\n\n'
    lines += '{"timestamp": 11, "prompt_tokens": 8, "output_tokens": 3}\n'
    first, second = read_trace(csv), read_trace(write(tmp_path / "a.jsonl", lines))
    assert first.arrivals_s == second.arrivals_s == (0.0, 0.5)
    assert first.lengths == second.lengths


def test_compressed_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv.xz").write_bytes(lzma.compress(AZURE.encode()))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(AZURE.encode()))
    traces = [read_trace(tmp_path / f"a.csv.{end}") for end in ("xz", "gz")]
    assert traces[0].lengths == traces[1].lengths
    (tmp_path / "b.csv.xz").write_text(AZURE)
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(tmp_path / "b.csv.xz")


@pytest.mark.parametrize(("suffix", "pack"), [(".xz", lzma.compress), (".gz", gzip.compress)])
def test_a_damaged_compressed_file_is_refused(
    tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]
) -> None:
    packed = bytearray(pack(AZURE.encode()))
    for idx in range(14, len(packed) - 14):
        packed[idx] ^= 0xFF
    (tmp_path / f"a.csv{suffix}").write_bytes(packed)
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(tmp_path / f"a.csv{suffix}")


def test_a_factor_scales_the_rate_and_a_number_cuts_the_trace(tmp_path: Path) -> None:
    path = write(tmp_path / "azure.csv", AZURE)
    whole = read_trace(path)
    fast = read_trace(path, num_requests=2, rate_scale=4.0)
    assert fast.arrivals_s == pytest.approx([each / 4 for each in whole.arrivals_s[:2]])
    sweep = trace_sweep(path, [1.0, 4.0], vocab_size=200, seed=0)
    slow, quick = (load(0) for load in sweep.loads)
    assert slow.requests == quick.requests
    assert quick.request_rate == pytest.approx(4 * slow.request_rate)
    assert slow.mode == "trace"
    with pytest.raises(UsageError, match="positive number"):
        read_trace(path, rate_scale=0.0)


HEAD = "timestamp,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD, "has no requests"),
        ("", "has no requests"),
        (HEAD + "1,5,5\n0.5,5,5\n", r":3: this request arrives before"),
        (HEAD + "1,5\n", r":2: there is no 'output_tokens' or 'GeneratedTokens'"),
        ("time,prompt_tokens,output_tokens\n1,5,5\n", r":2: there is no 'timestamp' or 'TIMESTAMP'"),
        (HEAD + "yesterday,5,5\n", r":2: the timestamp is 'yesterday'"),
        (HEAD + "nan,5,5\n", r":2: the timestamp is 'nan'"),
        (HEAD + "1,zero,5\n", r":2: prompt tokens is 'zero'"),
        (HEAD + "1,0,5\n", r":2: prompt tokens is '0'"),
        (HEAD + "1,5,-2\n", r":2: output tokens is '-2'"),
        (HEAD + "1,5,2.5\n", r":2: output tokens is '2.5'"),
    ],
)
def test_a_malformed_row_is_refused_by_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read_trace(write(tmp_path / "t.csv", text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r":1: this line is not JSON"),
        ("[1, 2, 3]", r":1: this line is \[1, 2, 3\], not a JSON object"),
        ('{"timestamp": true, "prompt_tokens": 1, "output_tokens": 1}', "timestamp is True"),
        ('{"timestamp": 1, "prompt_tokens": true, "output_tokens": 1}', "prompt tokens is True"),
        ('{"timestamp": 1, "prompt_tokens": 1}', "there is no 'output_tokens'"),
    ],
)
def test_a_malformed_line_is_refused_by_one_sentence(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_trace(write(tmp_path / "t.jsonl", line + "\n"))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")


CELLS = st.one_of(
    st.integers(-(10**20), 10**20).map(str),
    st.floats().map(str),
    st.sampled_from(
        ["", "2023-11-16 18:15:46.68", "0001-01-01", "9999-12-31T23:59:59.999999999-12:00", '"', "\0"]
    ),
    st.text(max_size=8),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(CELLS, min_size=1, max_size=4), max_size=4), st.sampled_from(["csv", "jsonl"]))
def test_any_text_is_a_trace_or_refused(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]], kind: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"any.{kind}"
    lines = [",".join(row) if kind == "csv" else f"[{','.join(row)}]" for row in rows]
    path.write_text("\n".join([HEAD.strip() if kind == "csv" else "", *lines]), "utf-8", "surrogatepass")
    try:
        trace = read_trace(path)
    except UsageError:
        return
    assert trace.arrivals_s[0] == 0.0
    assert list(trace.arrivals_s) == sorted(trace.arrivals_s)
