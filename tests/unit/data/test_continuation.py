"""Continuations: where a text ends and why, and what single tokens contribute to it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import compress
from compress.data.continuation import Continuation
from compress.data.token_text import TokenTexts
from compress.data.tokenizer import load_tokenizer

REFERENCE = Path(compress.__file__).parent / "reference"
END = 0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(REFERENCE)[0]


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def continued(tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> Continuation:
    return Continuation(tokenizer, prompt=ids(tokenizer, "def f"), stop=stop, end_ids=frozenset({END}))


def test_the_last_token_ends_a_text_by_length(tokenizer: Tokenizer) -> None:
    text = continued(tokenizer)
    tokens = ids(tokenizer, " return a + b")
    assert text.feed(tokens[:2], last=False) + text.feed(tokens[2:], last=True) == " return a + b"
    assert (text.reason, text.num_tokens) == ("length", len(tokens))
    assert text.feed(tokens, last=True) == ""


def test_an_end_token_ends_a_text_and_counts(tokenizer: Tokenizer) -> None:
    text = continued(tokenizer)
    tokens = ids(tokenizer, " return")
    assert text.feed([*tokens, END, *tokens], last=False) == " return"
    assert (text.reason, text.num_tokens) == ("stop", len(tokens) + 1)


def test_a_stop_string_comes_before_a_later_end_token(tokenizer: Tokenizer) -> None:
    text = continued(tokenizer, stop=("a +",))
    tokens = ids(tokenizer, " return a + b")
    assert text.feed([*tokens, END], last=True) == " return "
    assert text.reason == "stop"
    assert text.num_tokens <= len(tokens)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40), sizes=st.lists(st.integers(1, 5)))
def test_pieces_are_the_whole_text_however_tokens_come(
    tokenizer: Tokenizer, text: str, sizes: list[int]
) -> None:
    tokens = ids(tokenizer, text)
    if END in tokens:
        return
    continuation = Continuation(tokenizer, prompt=[], end_ids=frozenset({END}))
    left = list(tokens)
    pieces = []
    for size in sizes:
        pieces.append(continuation.feed(left[:size], last=False))
        left = left[size:]
    pieces.append(continuation.feed(left, last=True))
    assert "".join(pieces) == continuation.text == tokenizer.decode(tokens)
    assert continuation.num_tokens == len(tokens)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_the_bytes_of_tokens_are_the_bytes_of_their_text(tokenizer: Tokenizer, text: str) -> None:
    texts = TokenTexts(tokenizer)
    tokens = ids(tokenizer, text)
    assert b"".join(texts.bytes_of(each) for each in tokens) == text.encode()
    for each in tokens:
        try:
            assert texts.text_of(each) == texts.bytes_of(each).decode()
        except UnicodeDecodeError:
            assert texts.text_of(each).startswith("bytes:\\x")


def test_special_and_unknown_tokens_have_a_text(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    assert texts.text_of(END) == "<|endoftext|>"
    assert texts.is_special(END)
    assert not texts.is_special(5)
    assert texts.text_of(10**6) == ""
