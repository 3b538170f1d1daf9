"""Texts of single tokens: what one token of a vocabulary contributes to a text, as characters and as bytes.

A byte-level vocabulary writes every byte as one printable character (the table of GPT-2), SentencePiece
writes a space as U+2581 and a byte outside its vocabulary as `<0xNN>`. A token that holds a part of a
character has no text of its own: it is written `bytes:\\xe2\\x82`, as OpenAI's interface does.
"""

import re
from functools import cache, cached_property
from typing import TYPE_CHECKING

from compress.data.tokenizer import decode

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """The text and the bytes of each token of a tokenizer, found when they are first needed and then kept."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}

    def text_of(self, token: int) -> str:
        """Return a token as text; special tokens have their name."""
        text = self._texts.get(token)
        if text is None:
            content = self.bytes_of(token)
            try:
                text = content.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
            self._texts[token] = text
        return text

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token in UTF-8."""
        content = self._bytes.get(token)
        if content is None:
            content = self._bytes[token] = self._found(token)
        return content

    def is_special(self, token: int) -> bool:
        """Return whether a token has no text in what is generated."""
        return token in self._special

    @cached_property
    def _added(self) -> dict[int, str]:
        return {idx: each.content for idx, each in self._tokenizer.get_added_tokens_decoder().items()}

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(idx for idx, each in added.items() if each.special)

    def _found(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        kinds = str(self._tokenizer.decoder)
        if "ByteLevel" in kinds:
            table = _byte_of_character()
            if all(char in table for char in name):
                return bytes(table[char] for char in name)
        elif match := _BYTE.fullmatch(name):
            return bytes([int(match[1], 16)])
        elif "▁" in name:
            return name.replace("▁", " ").encode()
        return decode(self._tokenizer, [token], skip_special_tokens=False).encode()


@cache
def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary means: printable Latin-1 characters mean
    themselves, the others are numbered from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + idx): each for idx, each in enumerate(others)}
