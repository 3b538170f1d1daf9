"""Log probabilities of tokens in the two forms of OpenAI's interface."""

import codecs
from collections.abc import Sequence
from typing import Any

from compress.data.token_text import TokenTexts
from compress.runtime.request import TopLogprobs

LOWEST = -9999.0
"""The log probability of what is impossible: JSON has no infinity."""


def finite(logprob: float) -> float:
    """Return a log probability as a number of JSON."""
    return logprob if logprob > LOWEST else LOWEST


class CompletionLogprobs:
    """Writes `logprobs` of completions piece by piece; offsets go on from one piece to the next."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        top: Sequence[TopLogprobs | None],
    ) -> dict[str, Any]:
        """Return the object of the next tokens. `top_logprobs` are null where none were asked for, and have
        the token itself in addition to the likeliest ones.
        """
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            if not self._texts.is_special(token):
                self._offset += len(self._decoder.decode(self._texts.bytes_of(token)))
        return {
            "tokens": [self._texts.text_of(token) for token in tokens],
            "token_logprobs": [None if each is None else finite(each) for each in logprobs],
            "top_logprobs": [
                self._listed(token, logprob, likeliest)
                for token, logprob, likeliest in zip(tokens, logprobs, top, strict=True)
            ]
            if any(top)
            else None,
            "text_offset": offsets,
        }

    def _listed(
        self, token: int, logprob: float | None, likeliest: TopLogprobs | None
    ) -> dict[str, float] | None:
        if likeliest is None or logprob is None:
            return None
        listed: dict[str, float] = {}
        for each, value in (*likeliest, (token, logprob)):
            listed.setdefault(self._texts.text_of(each), finite(value))
        return listed


def chat_logprobs(
    texts: TokenTexts, tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[TopLogprobs]
) -> dict[str, Any]:
    """Return `logprobs` of a chat answer."""
    likeliest = top or [()] * len(tokens)
    return {
        "content": [
            {
                **_entry(texts, token, logprob),
                "top_logprobs": [_entry(texts, other, value) for other, value in others],
            }
            for token, logprob, others in zip(tokens, logprobs, likeliest, strict=True)
        ]
    }


def _entry(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": texts.text_of(token),
        "logprob": finite(logprob),
        "bytes": list(texts.bytes_of(token)),
    }
