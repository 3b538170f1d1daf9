"""The stream of a completion gives the same tokens in whatever pieces it arrives; chunks are not tokens."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.errors import StorageError, UsageError
from compress.validate.load.completion_chunks import Completion, CompletionStream
from compress.validate.load.http_stream import BodyDecoder, parse_address
from tests.support.completion_server import Answer, events


def read(answer: Answer, *, ending: str = "\n\n") -> Completion:
    """Feed one event a millisecond."""
    stream = CompletionStream()
    for idx, event in enumerate(events(answer, 7)):
        stream.feed((event + ending).encode(), idx / 1000)
    return stream.finish()


def whole(content: bytes) -> Completion:
    """Feed all bytes at once."""
    stream = CompletionStream()
    stream.feed(content, 0.0)
    return stream.finish()


def test_tokens_have_the_time_of_their_chunk() -> None:
    found = read(Answer((1, 3, 2), cached_tokens=4))
    assert found.token_times_s == (0.0, 0.001, 0.001, 0.001, 0.002, 0.002)
    assert (found.prompt_tokens, found.cached_tokens, found.inferred) == (7, 4, False)
    assert read(Answer((1, 3, 2)), ending="\r\n\r\n").token_times_s == found.token_times_s


def test_a_chunk_of_unknown_size_is_one_token_where_the_usage_agrees() -> None:
    found = read(Answer((1, 1, 1), stated=False))
    assert (found.token_times_s, found.inferred) == ((0.0, 0.001, 0.002), False)


def test_tokens_are_divided_evenly_where_chunks_do_not_add_up_and_the_result_is_marked() -> None:
    found = read(Answer((1, 5, 1), stated=False))
    assert found.token_times_s == (0.0, 0.0, 0.0, 0.001, 0.001, 0.002, 0.002)
    assert found.inferred


def test_without_any_usage_chunks_are_counted_and_marked() -> None:
    found = read(Answer((2, 2), stated=False, usage=False))
    assert (len(found.token_times_s), found.inferred, found.prompt_tokens) == (2, True, None)


@pytest.mark.parametrize("listed", [{"token_ids": [5, 6, 7]}, {"logprobs": {"tokens": ["a", "b", "c"]}}])
def test_tokens_that_a_chunk_lists_are_counted(listed: dict[str, Any]) -> None:
    stream = CompletionStream()
    event = {"choices": [{"text": "abc", "finish_reason": "length", **listed}]}
    stream.feed(f"data: {json.dumps(event)}\n\n".encode(), 1.0)
    found = stream.finish()
    assert (found.token_times_s, found.inferred) == ((1.0, 1.0, 1.0), False)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer((1, 1), error="out of memory"), "out of memory"),
        (Answer((0,)), "without a token"),
        (Answer((2, -1)), "went down"),
    ],
)
def test_what_is_wrong_with_a_stream_is_an_error(answer: Answer, message: str) -> None:
    with pytest.raises(StorageError, match=message):
        read(answer)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'data: {"choices": [{"text": "x"}]}\n\n', "before the completion was finished"),
        (b"data: {\n\n", "not JSON"),
        (b"data: [1]\n\n", "not a JSON object"),
        (b'data: {"choices": [{"text": 5}]}\n\n', "text = 5"),
        (b"", "before the completion was finished"),
        (
            b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n',
            "sent none of them",
        ),
    ],
)
def test_a_stream_of_another_form_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(StorageError, match=message):
        whole(content)


def chunked(pieces: list[bytes]) -> bytes:
    whole = b"".join(f"{len(each):X};note=1\r\n".encode() + each + b"\r\n" for each in pieces if each)
    return whole + b"0\r\nTrailer: x\r\n\r\n"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.lists(st.integers(1, 30), max_size=40))
def test_a_chunked_body_is_the_same_however_it_is_cut(pieces: list[bytes], cuts: list[int]) -> None:
    encoded = chunked(pieces)
    body = BodyDecoder(None, chunked=True)
    content = b""
    for cut in [*cuts, len(encoded)]:
        content += body.feed(encoded[:cut])
        encoded = encoded[cut:]
    assert content == b"".join(pieces)
    assert body.ended


def test_a_body_of_known_length_ends_there() -> None:
    body = BodyDecoder(5, chunked=False)
    assert body.feed(b"abc") + body.feed(b"defg") == b"abcde"
    assert body.ended
    assert BodyDecoder(0, chunked=False).ended


@pytest.mark.parametrize("bad", [b"xyz\r\n", b"-5\r\n", b"1" * 2000])
def test_a_chunk_without_a_size_is_refused(bad: bytes) -> None:
    with pytest.raises(StorageError, match="chunk"):
        BodyDecoder(None, chunked=True).feed(bad)


def test_an_address_is_a_server_and_a_path() -> None:
    assert str(parse_address("http://localhost:8000")) == "http://localhost:8000/v1"
    assert str(parse_address("https://host/api/v2/")) == "https://host:443/api/v2"
    assert str(parse_address("http://host:1/v1/completions")) == "http://host:1/v1"


@pytest.mark.parametrize(
    "bad", ["localhost:8000", "ftp://host", "http://", "http://host:x", "http://u:p@host", "http://host/a b"]
)
def test_what_is_no_url_of_a_server_is_refused(bad: str) -> None:
    with pytest.raises(UsageError):
        parse_address(bad)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "usage",
                    "completion_tokens",
                    "text",
                    "finish_reason",
                    "logprobs",
                    "tokens",
                    "error",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(JSON, max_size=4))
def test_any_events_are_a_completion_or_refused(found: list[Any]) -> None:
    try:
        done = whole(
            b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in found) + b"data: [DONE]\n\n"
        )
    except StorageError:
        return
    assert len(done.token_times_s) >= 1
