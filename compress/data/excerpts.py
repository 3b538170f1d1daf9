"""Excerpts of documents, and windows of tokens cut from them, with the tokens that count.

A token counts if its last character is in a counted range of its text. Windows in which no
token counts that a model predicts are left out: they would weigh nothing in a mean, and a loss over them is
undefined. The next window takes their place.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from compress.data.corpus import Document, Spans
from compress.data.tokenizer import encode, encode_with_ends

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Excerpt(NamedTuple):
    """A piece of a document; `counted` are ranges of `text`, None where all of it counts."""

    text: str
    counted: Spans | None = None


class EncodedExcerpt(NamedTuple):
    """The tokens of an excerpt; `counted` has one entry a token, None where all count."""

    ids: list[int]
    counted: list[bool] | None = None


def excerpts(document: Document, size: int) -> list[Excerpt]:
    """Cut a document into consecutive pieces of at most `size` characters, each ending at a line end if its
    second half has one; pieces of nothing but white space are left out."""
    text = document.text
    pieces = []
    start = 0
    while start < len(text):
        end = start + size
        if end < len(text):
            end = text.rfind("\n", start + size // 2, end) + 1 or end
        if not text[start:end].isspace():
            pieces.append(Excerpt(text[start:end], _within(document.counted, start, end)))
        start = end
    return pieces


def encoded_excerpts(
    tokenizer: "Tokenizer", batch: Sequence[Excerpt], separator: str = ""
) -> list[EncodedExcerpt]:
    """Return the tokens of each excerpt with the separator after it; a separator does not count."""
    texts = [each.text + separator for each in batch]
    if all(each.counted is None for each in batch):
        return [EncodedExcerpt(ids) for ids in encode(tokenizer, texts)]
    return [
        EncodedExcerpt(ids, None if excerpt.counted is None else _counted(ends, excerpt.counted))
        for excerpt, (ids, ends) in zip(batch, encode_with_ends(tokenizer, texts), strict=True)
    ]


class Windows:
    """Windows of `size` tokens that are cut from a stream one after the other, until there are `num_wanted`.

    `first_scored` is the first position of a window that a model predicts.
    """

    def __init__(self, size: int, num_wanted: int | None, *, first_scored: int) -> None:
        self._size = size
        self._num_wanted = num_wanted
        self._first_scored = first_scored
        self._rest = EncodedExcerpt([], [])
        self.ids: list[int] = []
        self.counted: list[bool] = []
        self.all_count = True
        self.num_without = 0

    def __len__(self) -> int:
        return len(self.ids) // self._size

    @property
    def is_full(self) -> bool:
        """Whether there are as many as are wanted."""
        return self._num_wanted is not None and len(self) >= self._num_wanted

    def add(self, encoded: EncodedExcerpt) -> None:
        """Append the tokens of an excerpt to the stream."""
        ids, counted = self._rest
        assert counted is not None
        ids += encoded.ids
        counted += [True] * len(encoded.ids) if encoded.counted is None else encoded.counted
        self.all_count = self.all_count and encoded.counted is None
        begin = 0
        while len(ids) - begin >= self._size and not self.is_full:
            end = begin + self._size
            if self.all_count or any(counted[begin + self._first_scored : end]):
                self.ids += ids[begin:end]
                self.counted += counted[begin:end]
            else:
                self.num_without += 1
            begin = end
        self._rest = EncodedExcerpt(ids[begin:], counted[begin:])

    def add_all(self, batch: Iterable[EncodedExcerpt]) -> None:
        """Append the tokens of several excerpts."""
        for each in batch:
            self.add(each)


def _within(counted: Spans | None, start: int, end: int) -> Spans | None:
    """Return the part of the ranges that is in `start` .. `end`, counted from `start`."""
    if counted is None:
        return None
    return tuple(
        (max(first, start) - start, min(last, end) - start)
        for first, last in counted
        if first < end and last > start
    )


def _counted(ends: Sequence[int], spans: Spans) -> list[bool]:
    """Return of each token, by the index after its last character, whether that character is in a range."""
    found = []
    ranges = iter((*spans, (1 << 62, 1 << 62)))
    first, last = next(ranges)
    for end in ends:
        while end > last:
            first, last = next(ranges)
        found.append(first < end)
    return found
