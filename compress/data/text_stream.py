"""Text of generated tokens, piece by piece: every piece is whole characters, and text ends before a stop
string.

A token of a byte-level or byte-fallback vocabulary may end inside a character, and a token's text may depend
on the one before it (SentencePiece drops a leading space). So tokens are decoded in a window that begins
before the last piece, and the window's text is held back while it ends with U+FFFD, the decoder's mark of an
incomplete character. The pieces joined are the text of all tokens decoded at once.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from compress.data.tokenizer import decode

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTEXT_TOKENS = 8
"""Prompt tokens that the first window begins with; a character has at most four bytes, so at most four
tokens.
"""
_INCOMPLETE = "\ufffd"
_MAX_SILENT_TOKENS = 8
"""The most tokens without text, such as special tokens, that the window keeps. Without a limit it would grow
with each of them, and each new token decodes the whole window."""


class TextStream:
    """The text of one generation. Feed it tokens in order; special tokens have no text.

    `prompt` are the tokens before the first generated one: with them the text continues the prompt exactly.
    `text` is what was returned so far; `num_tokens` counts the tokens fed. `stopped` is set once a stop
    string was found: later tokens are ignored.
    """

    def __init__(
        self, tokenizer: "Tokenizer", *, prompt: Sequence[int] = (), stop: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        self._num_shown = len(self._window)  # leading tokens of the window whose text was returned
        self._stop = tuple(stop)
        self._held = ""
        self.text = ""
        self.num_tokens = 0
        self.stopped = False

    def feed(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens complete: "" while it may still change, or may be the beginning
        of a stop string.
        """
        if not self._stop and len(tokens) > 1:  # no need to look after each token
            self.num_tokens += len(tokens)
            self._window += tokens
            return self._release(self._decoded(), final=False)
        pieces = []
        for token in tokens:
            if self.stopped:
                break
            self.num_tokens += 1
            self._window.append(token)
            pieces.append(self._release(self._decoded(), final=False))
        return "".join(pieces)

    def finish(self) -> str:
        """Return the text held back, when no more tokens will come; bytes of an incomplete character become
        U+FFFD.
        """
        return "" if self.stopped else self._release(self._decoded(final=True), final=True)

    def _decoded(self, *, final: bool = False) -> str:
        """Return the new text of the window and move the window on; "" while there is none, or its last
        character is incomplete.
        """
        shown = self._decode(self._window[: self._num_shown])
        text = self._decode(self._window)
        if text == shown and not text.endswith(_INCOMPLETE):
            del self._window[self._num_shown + _MAX_SILENT_TOKENS :]
        if not text.startswith(shown):
            shown = shown.rstrip(_INCOMPLETE)  # the prompt ended inside a character, which goes on
        if len(text) <= len(shown) or (text.endswith(_INCOMPLETE) and not final):
            return ""
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        return text[len(shown) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return decode(self._tokenizer, tokens)

    def _release(self, new: str, *, final: bool) -> str:
        """Return what of the held and the new text cannot be part of a stop string."""
        text = self._held + new
        found = [place for place in (text.find(each) for each in self._stop) if place >= 0]
        if found:
            self.stopped = True
            piece = text[: min(found)]
            self._held = ""
        else:
            num_held = 0 if final else self._num_in_doubt(text)
            piece = text[: len(text) - num_held]
            self._held = text[len(text) - num_held :]
        self.text += piece
        return piece

    def _num_in_doubt(self, text: str) -> int:
        """Return the length of the longest end of `text` with which some stop string begins."""
        longest = max((len(each) for each in self._stop), default=1) - 1
        ends = range(min(longest, len(text)), 0, -1)
        return next((size for size in ends if any(each.startswith(text[-size:]) for each in self._stop)), 0)
