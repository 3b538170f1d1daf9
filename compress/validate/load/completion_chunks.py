"""The events of a streamed completion, and how many tokens each of them brought.

A server of the OpenAI interface sends events `data: {...}`, and at the end `data: [DONE]`. An event is a
chunk of text and not a token: it may bring several (speculation, a server that joins steps), or none that
shows. The number of tokens in a chunk is, in this order: the growth of `usage.completion_tokens`, where every
event has it (`stream_options.continuous_usage_stats` of vLLM); the length of the chunk's `token_ids` or of
its `logprobs.tokens`; or else one. The usage of the whole request has the last word: where the chunks do not
add up to it, its tokens are divided evenly over the chunks, and the request is marked as `inferred`.
"""

from dataclasses import dataclass
from typing import Any

from compress.errors import StorageError
from compress.untrusted.fields import Fields, shown
from compress.untrusted.parse import Malformed, parse_json

MAX_EVENT_BYTES = 16 << 20
MAX_TOKENS = 1 << 20
DONE = b"[DONE]"


@dataclass(frozen=True)
class Completion:
    """The tokens of a whole stream. `prompt_tokens` is None where the server states no usage."""

    token_times_s: tuple[float, ...]
    prompt_tokens: int | None
    cached_tokens: int
    inferred: bool


class CompletionStream:
    """Collects one stream. `feed` it the bytes of the body with the time at which they came."""

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[bytes] = []
        self._chunks: list[tuple[float, int]] = []
        self._num_stated = 0
        self._all_stated = True
        self._total: int | None = None
        self._prompt_tokens: int | None = None
        self._cached_tokens = 0
        self._finished = False

    def feed(self, content: bytes, time_s: float) -> None:
        """Take a piece of the body.

        Raises:
            StorageError: an event has another form than the interface has, or the server sent an error.
        """
        self._buffer += content
        if len(self._buffer) > MAX_EVENT_BYTES:
            raise StorageError(f"the server sent an event of more than {MAX_EVENT_BYTES:,} bytes.")
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in (each.rstrip(b"\r") for each in lines):
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif not line and self._data:
                event = b"\n".join(self._data)
                self._data = []
                self._take(event, time_s)

    def finish(self) -> Completion:
        """Return what the stream brought.

        Raises:
            StorageError: the stream ended early, or brought no token.
        """
        if not self._finished:
            raise StorageError("the server ended the stream before the completion was finished.")
        counts = [count for _, count in self._chunks]
        total = sum(counts) if self._total is None else self._total
        inferred = self._total is None and not self._all_stated
        if sum(counts) != total:
            inferred = True
            counts = _evenly(total, counts)
        if total == 0:
            raise StorageError("the server finished the completion without a token.")
        times_s = tuple(
            time_s for (time_s, _), count in zip(self._chunks, counts, strict=True) for _ in range(count)
        )
        return Completion(times_s, self._prompt_tokens, self._cached_tokens, inferred)

    def _take(self, event: bytes, time_s: float) -> None:
        if event == DONE:
            self._finished = True
            return
        try:
            value = parse_json(event)
        except Malformed as error:
            raise StorageError(f"the server sent an event that is not JSON: {error}.") from None
        fields = Fields(value, "an event of the server", StorageError)
        if fields.has("error"):
            raise StorageError(f"the server sent an error: {shown(value['error'])}.")
        stated = self._usage(fields) if fields.has("usage") else None
        choices = fields.items("choices", default=())
        if not choices:
            return  # the usage of the whole request, at the end
        choice = Fields(choices[0], "a choice of the server", StorageError)
        self._finished = self._finished or choice.has("finish_reason")
        count = _stated_tokens(choice) if stated is None else stated - self._num_stated
        if count is None:
            self._all_stated = False
            count = int(bool(choice.text("text", default="")))
        if count < 0:
            raise StorageError("the server's count of tokens went down during a stream.")
        self._num_stated += count
        if count > 0:
            self._chunks.append((time_s, count))

    def _usage(self, event: Fields) -> int:
        """Take the usage of an event and return the tokens generated so far."""
        usage = event.fields("usage")
        self._total = usage.integer("completion_tokens", 0, MAX_TOKENS, default=0)
        if usage.has("prompt_tokens"):
            self._prompt_tokens = usage.integer("prompt_tokens", 0, MAX_TOKENS)
        details = usage.fields("prompt_tokens_details", default={})
        self._cached_tokens = details.integer("cached_tokens", 0, MAX_TOKENS, default=0)
        return self._total


def _stated_tokens(choice: Fields) -> int | None:
    """Return the number of tokens that a chunk lists; None where it lists none."""
    if choice.is_list("token_ids"):
        return len(choice.items("token_ids"))
    if choice.has("logprobs"):
        logprobs: Any = choice.fields("logprobs")
        if logprobs.is_list("tokens"):
            return len(logprobs.items("tokens"))
    return None


def _evenly(total: int, counts: list[int]) -> list[int]:
    """Return `total` tokens divided over the chunks; the first ones have one more where it does not divide.

    Raises:
        StorageError: there is no chunk to have them.
    """
    if not counts:
        raise StorageError(f"the server states {total} tokens and sent none of them.")
    each, rest = divmod(total, len(counts))
    return [each + (idx < rest) for idx in range(len(counts))]
