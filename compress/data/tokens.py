"""Token sets: the fixed windows of tokens that a model is calibrated or evaluated on.

Evaluation (`seed=None`) is convention A: all documents joined by the separator, tokenized as one text, cut
into non-overlapping windows in corpus order, without the tail. `num_samples` takes the first windows.

Calibration (a seed) draws text from the whole corpus in one pass and bounded memory. Every document is cut
into excerpts of about one window (8 characters a token, ending at a line end where possible), and every
excerpt gets the key (round, sha256(seed, id, excerpt)): in round 0 each document offers one excerpt, drawn by
hash, in round 1 a second, and so on. The excerpts with the smallest keys are kept, joined in key order and
cut into windows. So a sample is spread over as many documents as possible (short prose counts as much as a
long source), the order of the documents does not matter, a larger sample begins with the smaller one, and
only text that is used is tokenized.

Bytes. `num_bytes` counts the UTF-8 bytes of the text tokens, token by token from the vocabulary, so a
character that is split between two windows is counted correctly. Bits per byte divides by `num_scored_bytes`,
which leaves out the first token of a window that has no BOS, because nothing predicts that token.

Of a text in which only some ranges count (the answers of conversations), a calibration sample also holds
which tokens count (`excerpts.py`); windows without any are replaced by the next. Evaluation counts every
token.

Shapes: N samples, S sequence.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compress.artifact.tensors import save_tensors
from compress.data.corpus import Document, Packing, TextHasher
from compress.data.excerpts import EncodedExcerpt, Excerpt, Windows, encoded_excerpts, excerpts
from compress.data.tokenizer import encode, token_bytes
from compress.digest import canonical_json, digest_bytes
from compress.errors import StorageError, UnsupportedFormat, UsageError
from compress.untrusted.fields import Fields
from compress.untrusted.files import open_plain
from compress.untrusted.parse import Malformed, parse_json

if TYPE_CHECKING:  # a token set can be read where `tokenizers` is not installed
    from tokenizers import Tokenizer

_EXCERPT_CHARS_PER_TOKEN = 8
_KEPT_EXCERPTS_PER_SAMPLE: Mapping[Packing, int] = {
    "concatenate": 3,
    "first_tokens": 16,
}  # spare, for long tokens and for short documents
_BATCH = 32
_CUT_MARGIN = 64  # tokens before a cut through the text whose ids might change if the text went on
_FACTS_KEY = "token_set"
_COUNTED = "counted"


@dataclass(frozen=True, eq=False)
class TokenSet:
    """Windows of token ids, int32 [N, S]; `source` holds the facts of the card and of the text that was
    read. `counted_NS`, bool [N, S], are the tokens that statistics and losses count; None where all do. Then
    `num_scored_bytes` are those of the counted tokens alone."""

    tokens_NS: Tensor
    num_bytes: int
    num_scored_bytes: int
    source: dict[str, Any]
    counted_NS: Tensor | None = None

    def digest(self) -> str:
        """Return the digest of the shape, the ids and which of them count, which cache keys and reports
        contain."""
        shape = canonical_json(list(self.tokens_NS.shape))
        ids = self.tokens_NS.contiguous().numpy().astype("<i4").tobytes()
        counted = b"" if self.counted_NS is None else self.counted_NS.contiguous().numpy().tobytes()
        return digest_bytes(shape + ids + counted)

    def beginnings(self, num_samples: int) -> "TokenSet":
        """Return the first windows without their last tokens, which training only predicts."""
        some_NS, counted_NS = (
            None if each is None else each[:num_samples, :-1].contiguous()
            for each in (self.tokens_NS, self.counted_NS)
        )
        assert some_NS is not None
        return replace(self, tokens_NS=some_NS, counted_NS=counted_NS)


def tokenize(
    documents: Iterable[Document],
    tokenizer: "Tokenizer",
    *,
    num_samples: int | None,
    seq_len: int,
    seed: int | None,
    bos: int | None,
    packing: Packing = "concatenate",
    separator: str = "\n\n",
    facts: Mapping[str, Any] | None = None,
) -> TokenSet:
    """Return `num_samples` windows of `seq_len` tokens: with a seed drawn from the whole corpus, without one
    the first in order (`None`: all).

    With `bos`, every window starts with that id and has seq_len - 1 tokens of text. With packing
    `first_tokens` a window is the beginning of one document, and shorter documents are skipped. `documents`
    is always read to its end, so that `source["text_digest"]` identifies the text.

    Raises:
        UsageError: too little text.
        UnsupportedFormat: a tokenizer whose tokens do not determine their number of bytes.
    """
    body_len = seq_len - (bos is not None)
    if body_len < 1 or (num_samples is not None and num_samples < 1):
        raise UsageError(
            f"num_samples {num_samples} and seq_len {seq_len} leave no room for a token of text: give "
            "larger numbers."
        )
    if num_samples is None and seed is not None:
        raise UsageError("a seeded sample needs num_samples; without a seed all windows are taken in order.")
    reading = _Reading(documents)
    windows = Windows(body_len, num_samples, first_scored=int(bos is None))
    num_tokens = None if num_samples is None else num_samples * body_len
    if seed is None and packing == "concatenate":
        texts = (document.text for document in reading)
        windows.add(EncodedExcerpt(_joined(texts, tokenizer, separator, num_tokens=num_tokens)))
    else:
        chosen: Iterable[Excerpt] = (Excerpt(document.text) for document in reading)
        if seed is not None and num_samples is not None:
            chosen = _sampled(reading, seed=seed, num_samples=num_samples, body_len=body_len, packing=packing)
        _fill(windows, chosen, tokenizer, separator, heads_of=body_len if packing == "first_tokens" else None)
    reading.drain()
    if len(windows) < (num_samples or 1):
        hint = "packing `concatenate`, " if packing == "first_tokens" else ""
        without = f", besides {windows.num_without} in which nothing counts" if windows.num_without else ""
        raise UsageError(
            f"the data gives {len(windows)} windows of {body_len} text tokens ({packing}){without}, and "
            f"{num_samples or 1} are needed; it has {reading.num_documents:,} documents with "
            f"{reading.num_chars:,} characters. Take {hint}fewer samples, a smaller seq_len, or more text."
        )
    source = {**(facts or {}), **reading.facts(), "packing": packing, "seed": seed}
    return _token_set(windows, body_len, tokenizer, bos, source)


def save_token_set(token_set: TokenSet, path: Path) -> None:
    """Write one safetensors file with the ids and, in its header, the facts. The same token set gives the
    same bytes."""
    facts = {
        "num_bytes": token_set.num_bytes,
        "num_scored_bytes": token_set.num_scored_bytes,
        "source": token_set.source,
    }
    tensors = {"tokens": token_set.tokens_NS}
    if token_set.counted_NS is not None:
        tensors[_COUNTED] = token_set.counted_NS
    save_tensors(path, tensors, metadata={_FACTS_KEY: canonical_json(facts).decode()})


def load_token_set(path: Path) -> TokenSet:
    """Read what `save_token_set` wrote.

    Raises:
        StorageError: the file is missing or broken.
        UnsupportedFormat: it is a safetensors file of another kind.
    """
    try:
        open_plain(path).close()  # `safe_open` would wait for the writer of a FIFO
        with safe_open(path, framework="pt") as file:
            stored = (file.metadata() or {}).get(_FACTS_KEY)
            tokens_NS = None if stored is None else file.get_tensor("tokens")
            counted_NS = file.get_tensor(_COUNTED) if _COUNTED in file.keys() else None  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise StorageError(f"the token set '{path}' cannot be read: {error}") from error
    if stored is None or tokens_NS is None:
        raise UnsupportedFormat(
            f"'{path}' is a safetensors file, but no token set: its header has no '{_FACTS_KEY}'."
        )
    try:
        facts = Fields(parse_json(stored), f"the header of the token set '{path}'", StorageError)
    except Malformed as error:
        raise StorageError(f"the token set '{path}' is damaged: {error}; build it again.") from None
    if tokens_NS.dtype != torch.int32 or tokens_NS.dim() != 2:
        raise StorageError(
            f"the token set '{path}' is damaged: its tokens are {tokens_NS.dtype} {list(tokens_NS.shape)}, "
            "where a matrix of int32 belongs; build it again."
        )
    if counted_NS is not None and (counted_NS.dtype != torch.bool or counted_NS.shape != tokens_NS.shape):
        raise StorageError(
            f"the token set '{path}' is damaged: which tokens count is {counted_NS.dtype} "
            f"{list(counted_NS.shape)}, where a bool for each token belongs; build it again."
        )
    return TokenSet(
        tokens_NS,
        facts.integer("num_bytes", 0, 1 << 60),
        facts.integer("num_scored_bytes", 0, 1 << 60),
        dict(facts.mapping("source")),
        counted_NS,
    )


# ------------------------------------------------------------------------------------------------------------
# ------ reading


class _Reading:
    """A stream of documents that is counted and hashed while it is read."""

    def __init__(self, documents: Iterable[Document]) -> None:
        self._documents = iter(documents)
        self._hasher = TextHasher()
        self.num_documents = 0
        self.num_chars = 0

    def __iter__(self) -> Iterator[Document]:
        for document in self._documents:
            self._hasher.update(document)
            self.num_documents += 1
            self.num_chars += len(document.text)
            yield document

    def drain(self) -> None:
        for _ in self:
            pass

    def facts(self) -> dict[str, Any]:
        return {
            "text_digest": self._hasher.digest(),
            "num_documents": self.num_documents,
            "num_chars": self.num_chars,
        }


def _sampled(
    documents: Iterable[Document], *, seed: int, num_samples: int, body_len: int, packing: Packing
) -> list[Excerpt]:
    """Return the excerpts with the smallest keys, in key order: as many as the windows need, and never more
    in memory."""
    size = _EXCERPT_CHARS_PER_TOKEN * body_len
    budget = num_samples * _KEPT_EXCERPTS_PER_SAMPLE[packing] * size
    kept: list[tuple[int, int, Excerpt]] = []  # a heap with the largest key on top, hence the minus signs
    num_chars = 0
    for document in documents:
        pieces = excerpts(document, size)
        if packing == "first_tokens":
            pieces = pieces[:1] if len(document.text.encode("utf-8", "surrogatepass")) >= body_len else []
        for round_idx, (key, excerpt) in enumerate(
            sorted((_key(seed, document.id, idx), piece) for idx, piece in enumerate(pieces))
        ):
            if num_chars >= budget and (-round_idx, -key) <= kept[0][:2]:
                break  # later rounds have larger keys still
            heapq.heappush(kept, (-round_idx, -key, excerpt))
            num_chars += len(excerpt.text)
            while num_chars - len(kept[0][2].text) >= budget:
                num_chars -= len(heapq.heappop(kept)[2].text)
    return [excerpt for _, _, excerpt in sorted(kept, reverse=True)]


def _key(seed: int, doc_id: str, excerpt_idx: int) -> int:
    return int.from_bytes(
        sha256(f"{seed}/{excerpt_idx}/{doc_id}".encode("utf-8", "surrogatepass")).digest()[:8], "big"
    )


# ------------------------------------------------------------------------------------------------------------
# ----- encoding


def _joined(
    texts: Iterable[str], tokenizer: "Tokenizer", separator: str, *, num_tokens: int | None
) -> list[int]:
    """Return the ids of the joined text, or of a beginning of it that is long enough to fix the first
    `num_tokens`."""
    source = iter(texts)
    taken = list[str]()
    num_chars = 0
    target = None if num_tokens is None else _EXCERPT_CHARS_PER_TOKEN * num_tokens
    while True:
        num_before = len(taken)
        for text in source:
            taken.append(text)
            num_chars += len(text)
            if target is not None and num_chars >= target:
                break
        exhausted = len(taken) == num_before or target is None or num_chars < target
        ids = encode(tokenizer, [separator.join(taken)])[0]
        if exhausted or len(ids) >= (num_tokens or 0) + _CUT_MARGIN:
            return ids
        target = 2 * num_chars


def _fill(
    windows: Windows,
    chosen: Iterable[Excerpt],
    tokenizer: "Tokenizer",
    separator: str,
    *,
    heads_of: int | None,
) -> None:
    """Cut windows from excerpts until there are enough: from all of them, joined by the separator, or
    (`heads_of`) the first so many tokens of every excerpt that has them."""
    source = iter(chosen)
    while not windows.is_full and (batch := list(islice(source, _BATCH))):
        if heads_of is None:
            windows.add_all(encoded_excerpts(tokenizer, batch, separator))
        else:
            windows.add_all(
                EncodedExcerpt(ids[:heads_of], None if counted is None else counted[:heads_of])
                for ids, counted in encoded_excerpts(tokenizer, batch)
                if len(ids) >= heads_of
            )


def _token_set(
    windows: Windows, body_len: int, tokenizer: "Tokenizer", bos: int | None, source: dict[str, Any]
) -> TokenSet:
    body_NS = torch.tensor(windows.ids, dtype=torch.int32).view(-1, body_len)
    unique, inverse = torch.unique(body_NS, return_inverse=True)
    bytes_NS = torch.tensor(token_bytes(tokenizer, unique.tolist()), dtype=torch.int64)[inverse]
    num_bytes = int(bytes_NS.sum())
    counted_NS = None
    scored_NS = bytes_NS if bos is not None else bytes_NS[:, 1:]
    if not windows.all_count:
        counted_NS = torch.tensor(windows.counted).view(-1, body_len)
        scored_NS = scored_NS * (counted_NS if bos is not None else counted_NS[:, 1:])
        source = {
            **source,
            "num_counted": int(counted_NS.sum()),
            "windows_without_counted": windows.num_without,
        }
    num_scored_bytes = int(scored_NS.sum())
    if bos is not None:
        bos_N1 = torch.full((len(body_NS), 1), bos, dtype=torch.int32)
        body_NS = torch.cat((bos_N1, body_NS), dim=1)
        if counted_NS is not None:
            counted_NS = torch.cat((torch.zeros(len(body_NS), 1, dtype=torch.bool), counted_NS), dim=1)
    return TokenSet(body_NS, num_bytes, num_scored_bytes, source, counted_NS)
