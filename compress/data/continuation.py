"""The continuation of a prompt: generated tokens become text, up to the token or the stop string that ends
it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from compress.data.text_stream import TextStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Continuation:
    """The text of one generation. Feed it tokens in order until it has a `reason`.

    `end_ids` are the end-of-sequence tokens, and none where they are to be ignored. `reason` is "stop" once a
    stop string or one of `end_ids` came, "length" once the last token was fed without either, and None
    before. `num_tokens` counts the tokens up to there, an end-of-sequence token included; `text` is what was
    returned so far.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        *,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        end_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._stream = TextStream(tokenizer, prompt=prompt, stop=stop)
        self._end_ids = end_ids
        self._num_ends = 0
        self.reason: Literal["stop", "length"] | None = None

    @property
    def text(self) -> str:
        """The text returned so far."""
        return self._stream.text

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the text, an end-of-sequence token included."""
        return self._stream.num_tokens + self._num_ends

    def feed(self, tokens: Sequence[int], *, last: bool) -> str:
        """Return the text that these tokens complete; with `last` no more tokens will come. Tokens after the
        end are ignored.
        """
        if self.reason is not None:
            return ""
        ends = (idx for idx, token in enumerate(tokens) if token in self._end_ids)
        num_before_end = next(ends, len(tokens))
        piece = self._stream.feed(tokens[:num_before_end])
        has_end = num_before_end < len(tokens) and not self._stream.stopped
        if not (last or has_end or self._stream.stopped):
            return piece
        self._num_ends = int(has_end)
        self.reason = "stop" if has_end or self._stream.stopped else "length"
        return piece + self._stream.finish()
