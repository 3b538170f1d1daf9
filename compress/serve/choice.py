"""One text of an answer on its way back: tokens come in from the engine, text goes out.

Tokens are received in the event loop. They may be taken in another thread, as those of an echo are, so both
hold a lock while they touch what was received.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from compress.data.continuation import Continuation
from compress.runtime.prompt_logprobs import PromptLogprobs
from compress.runtime.request import Finished, TopLogprobs
from compress.serve.ask import Prompt
from compress.serve.engine_thread import Job, Progress


class TokenObserver(Protocol):
    """Counts tokens as they come, for metrics."""

    def first_token(self, ttft_s: float) -> None: ...
    def later_tokens(self, num_tokens: int, gap_s: float) -> None: ...
    def generated(self, num_tokens: int) -> None: ...


@dataclass(frozen=True)
class Piece:
    """The next part of a text, with the tokens it was made of and their log probabilities where those were
    asked for. The last piece has a `finish_reason`.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]
    finish_reason: str | None


class Choice:
    """One continuation of one prompt (`continuation` None: the prompt is only scored or repeated).

    `eager` means that somebody looks at every token as it comes: the text is streamed, or may end by a stop
    string. `wake` is called when there is something to look at, `stop` when the text has ended before the
    engine's request has.
    """

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        continuation: Continuation | None,
        *,
        may_stop: bool,
        eager: bool,
        arrival_s: float,
        observer: TokenObserver,
        wake: Callable[[], None],
        stop: Callable[["Choice"], None],
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.arrival_s = arrival_s
        self.job: Job | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        self.finished: Finished | None = None
        self.error: Exception | None = None
        self.done = False
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.batch_sizes = 0  # summed over the steps that gave it tokens
        self.num_steps = 0
        self._continuation = continuation
        self._cut = False
        self._may_stop = may_stop
        self._eager = eager or may_stop
        self._observer = observer
        self._wake = wake
        self._stop = stop
        self._lock = threading.Lock()
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[TopLogprobs] = []

    @property
    def tpot_s(self) -> float | None:
        """The mean time of each token after the first; None where there is none."""
        if self.first_s is None or self.last_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)

    def receive(self, progress: Progress) -> None:
        """Take what a step of the engine gave."""
        with self._lock:
            if progress.error is not None:
                self.error = progress.error
                self.finish_reason = "error"
                self.done = True
            if progress.prompt_logprobs is not None:
                self.prompt_logprobs = progress.prompt_logprobs
                self.done = self._continuation is None
            if progress.tokens and self.finish_reason is None:
                self._receive_tokens(progress)
            if progress.finished is not None:
                self.finished = progress.finished
                self.done = True
        if self.done or self._eager:
            self._wake()

    def _receive_tokens(self, progress: Progress) -> None:
        num = len(progress.tokens)
        if self.first_s is None or self.last_s is None:
            self.first_s = progress.now_s
            self._observer.first_token(progress.now_s - self.arrival_s)
            if num > 1:
                self._observer.later_tokens(num - 1, 0.0)
        else:
            self._observer.later_tokens(num, (progress.now_s - self.last_s) / num)
        self.last_s = progress.now_s
        self.batch_sizes += progress.batch_size
        self.num_steps += 1
        self._tokens += progress.tokens
        self._logprobs += progress.logprobs
        self._top += progress.top_logprobs
        if not self._may_stop:
            self._observer.generated(num)

    def take(self) -> Piece | None:
        """Return what has come since the last call as text, and None where that is nothing."""
        if self.finish_reason is not None:
            return None
        if self._continuation is None:
            if not self.done:
                return None
            self.finish_reason = "abort" if self._cut else "length"
            return Piece("", (), (), (), self.finish_reason)
        with self._lock:
            tokens, self._tokens = self._tokens, []
            logprobs, self._logprobs = self._logprobs, []
            top, self._top = self._top, []
            done = self.done
        text = self._continuation.feed(tokens, last=done)
        num = self._continuation.num_tokens - self.num_tokens
        self.num_tokens += num
        if self._may_stop:
            self._observer.generated(num)
        reason = self._reason()
        with self._lock:
            if self.finish_reason is None:  # an error may have come meanwhile
                self.finish_reason = reason
        if self.finish_reason is not None and not done:
            self._stop(self)
        if not (text or num or self.finish_reason):
            return None
        return Piece(text, tuple(tokens[:num]), tuple(logprobs[:num]), tuple(top[:num]), self.finish_reason)

    def _reason(self) -> str | None:
        assert self._continuation is not None
        reason = self._continuation.reason
        cut = self.finished is not None and self.finished.reason in ("cancelled", "deadline")
        return "abort" if reason == "length" and (cut or self._cut) else reason

    def abort(self) -> None:
        """End a text that the engine never had."""
        self._cut = True
        self.done = True
        self._wake()
