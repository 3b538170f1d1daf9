"""The tokenizer of a model directory: read, and used, with every failure of a broken one as a refusal."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from compress.digest import digest_bytes
from compress.errors import StorageError, UnsupportedFormat
from compress.untrusted.files import check_within, is_lfs_pointer, lfs_pointer_error, read_bytes
from compress.untrusted.parse import parse_json

if TYPE_CHECKING:  # token sets are read where `tokenizers` is not installed
    from tokenizers import Encoding, Tokenizer

MAX_TOKENIZER_BYTES = 256 << 20
MAX_ID = (1 << 31) - 1


def check_tokenizer(model_dir: Path | None) -> None:
    """Check before any work that a model whose weights are in a directory has its tokenizer there, too.

    Raises:
        UnsupportedFormat: there is none, or it cannot be read.
        StorageError: it cannot be opened, or is a Git LFS pointer.
    """
    if model_dir is not None and next(model_dir.glob("*.safetensors"), None) is not None:
        _check_there(model_dir)
        state = (model_dir / "tokenizer.json").stat()
        _check_readable(model_dir, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=4)
def _check_readable(model_dir: Path, changed_ns: int, num_bytes: int) -> None:
    """Read a tokenizer, once for all stages that ask: one of 17 MB takes most of a second."""
    del changed_ns, num_bytes  # a file that was changed is read again
    load_tokenizer(model_dir)


def _check_there(model_dir: Path) -> None:
    if not (model_dir / "tokenizer.json").exists():
        raise UnsupportedFormat(
            f"'{model_dir}' has no tokenizer.json, the only tokenizer format read here. Loading it once with "
            "`transformers.AutoTokenizer` and calling `save_pretrained` writes one from tokenizer.model or "
            "vocab.json."
        )


def load_tokenizer(model_dir: Path) -> tuple["Tokenizer", str]:
    """Return the tokenizer of a model directory, with truncation and padding switched off, and the digest of
    its file.

    Raises:
        UnsupportedFormat: there is no readable `tokenizer.json`.
        StorageError: it cannot be opened, or is a Git LFS pointer.
    """
    from tokenizers import Tokenizer

    _check_there(model_dir)
    path = model_dir / "tokenizer.json"
    check_within(model_dir, path)
    try:
        data = read_bytes(path, max_bytes=MAX_TOKENIZER_BYTES)
    except OSError as error:
        raise StorageError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    if is_lfs_pointer(data):
        raise lfs_pointer_error(path)
    with _as_refusal(f"'{path}' is not a tokenizer that `tokenizers` can read"):
        tokenizer = Tokenizer.from_buffer(data)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, digest_bytes(data)


def encode(
    tokenizer: "Tokenizer", texts: Sequence[str], *, add_special_tokens: bool = False
) -> list[list[int]]:
    """Return the ids of each text.

    Raises:
        UnsupportedFormat: the tokenizer breaks its own rules, or has an id beyond int32.
    """
    return [each.ids for each in _encoded(tokenizer, texts, add_special_tokens=add_special_tokens)]


def encode_with_ends(tokenizer: "Tokenizer", texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Return the ids of each text, and for each id the index after its last character.

    Raises:
        UnsupportedFormat: as `encode`, or the tokenizer does not keep the order of characters.
    """
    found = []
    for text, each in zip(texts, _encoded(tokenizer, texts, add_special_tokens=False), strict=True):
        ends = [end for _, end in each.offsets]
        if any(end < before for before, end in zip(ends, ends[1:], strict=False)) or max(
            ends, default=0
        ) > len(text):
            raise UnsupportedFormat(
                "the model's tokenizer.json does not tell which characters a token stands for, so that "
                "answers cannot be counted alone: set `count: all` in the card's `chat`."
            )
        found.append((each.ids, ends))
    return found


def _encoded(tokenizer: "Tokenizer", texts: Sequence[str], *, add_special_tokens: bool) -> list["Encoding"]:
    clean = [text.encode("utf-8", "replace").decode() for text in texts]  # half a surrogate pair is not text
    with _as_refusal("the model's tokenizer.json cannot encode this text"):
        encoded: list[Encoding] = tokenizer.encode_batch(clean, add_special_tokens=add_special_tokens)
        largest = max((max(each.ids, default=0) for each in encoded), default=0)
    if largest > MAX_ID:
        raise UnsupportedFormat(f"the model's tokenizer.json has the id {largest}; ids end at {MAX_ID:,}.")
    return encoded


def decode(tokenizer: "Tokenizer", ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Return the text of ids.

    Raises:
        UnsupportedFormat: the tokenizer breaks its own rules.
    """
    with _as_refusal("the model's tokenizer.json cannot decode its ids"):
        text: str = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    return text


def token_bytes(tokenizer: "Tokenizer", ids: Sequence[int]) -> list[int]:
    """Return the number of UTF-8 bytes of each id. A byte-level vocabulary writes one character a byte,
    SentencePiece a space as U+2581 and a byte as <0xNN>."""
    with _as_refusal("the model's tokenizer.json has a decoder that cannot be read"):
        decoder = (
            {} if tokenizer.decoder is None else parse_json(tokenizer.decoder.__getstate__(), as_python=True)
        )
    kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if "type" in part}
    added = {idx: len(token.content.encode()) for idx, token in tokenizer.get_added_tokens_decoder().items()}
    tokens = [tokenizer.id_to_token(idx) or "" for idx in ids]
    if "ByteLevel" in kinds:
        return [added.get(idx) or len(token) for idx, token in zip(ids, tokens, strict=True)]
    if kinds & {"Metaspace", "ByteFallback"}:
        is_byte = re.compile(r"<0x[0-9A-F]{2}>").fullmatch
        return [
            added.get(idx) or (1 if is_byte(token) else len(token.replace("▁", " ").encode()))
            for idx, token in zip(ids, tokens, strict=True)
        ]
    raise UnsupportedFormat(
        "the number of bytes of a token is unknown for this tokenizer's decoder "
        f"({', '.join(sorted(kinds)) or 'none'}); byte-level and SentencePiece tokenizers are supported."
    )


@contextlib.contextmanager
def _as_refusal(sentence: str) -> Iterator[None]:
    """Make UnsupportedFormat of whatever `tokenizers` raises for a file that breaks its rules: many classes,
    and panics of Rust, which are no Exception."""
    try:
        yield
    except MemoryError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UnsupportedFormat(f"{sentence}: {error}") from None
