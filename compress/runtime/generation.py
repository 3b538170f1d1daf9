"""A request in progress: its tokens, its blocks, and how far it has come."""

from dataclasses import dataclass, field

from compress.runtime.request import Finished, Reason, Request, TopLogprobs


@dataclass(eq=False)
class Generation:
    """A request in progress: its tokens so far, prompt included, and the blocks of its keys and values.

    The keys and values of the first `num_computed` tokens are in `blocks`, once the device has done what was
    launched. Steps that were launched and not read choose `num_pending` more tokens; speculative steps, which
    may give several, count none. `prefill_end` tokens are prefilled after the last admission, and later ones
    are decoded; while it is prefilled, `leader` is the request whose chunks are its own too, if there is one.
    It may have `end` tokens in all, and nothing is appended once it has `ended`. It was
    admitted first at `admitted_s`, when the prefix cache had `cached_tokens` of its prompt; its first
    `num_cached_blocks` blocks are in that cache, by `block_keys`.

    Of a model with states (`prefix_states.py`) it departs from the prompts before it after `branch` tokens,
    its state was last saved after `saved_tokens`, and it holds `first_copy`, the copy of its first block that
    is cached.
    """

    request: Request
    arrival_s: float
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0
    prefill_end: int = 0
    leader: "Generation | None" = field(default=None, repr=False)
    token_times_s: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    admitted_s: float | None = None
    cached_tokens: int = 0
    block_keys: list[bytes] = field(default_factory=list)
    num_cached_blocks: int = 0
    branch: int = 0
    saved_tokens: int = 0
    first_copy: int | None = None
    ended: bool = False
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = len(self.request.prompt) + self.request.params.max_tokens

    @property
    def generated(self) -> list[int]:
        """Tokens generated so far, without the prompt."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def num_left(self) -> int:
        """Number of tokens that may still be generated."""
        return self.end - len(self.tokens)

    @property
    def length(self) -> int:
        """Number of tokens once every step that was launched is read."""
        return len(self.tokens) + self.num_pending

    @property
    def is_complete(self) -> bool:
        """Whether it has all its tokens once every step that was launched is read."""
        return self.length >= self.end

    @property
    def decoding(self) -> bool:
        """Whether its prefill is complete."""
        return self.num_computed >= self.prefill_end

    def follows(self, leader: "Generation") -> bool:
        """Return whether this request is prefilled by the chunks of `leader`."""
        return self.leader is leader and not self.decoding

    def append(
        self, tokens: list[int], now_s: float, eos: frozenset[int], logprobs: list[float] | None = None
    ) -> Reason | None:
        """Append new tokens, up to one of `eos` or as many as are left; return why the request ended, if it
        did.
        """
        reason: Reason | None = None
        if len(self.tokens) + len(tokens) >= self.end or not eos.isdisjoint(tokens):
            tokens, reason = self._until_end(tokens, eos)
        self.tokens += tokens
        self.token_times_s += [now_s] * len(tokens)
        self.num_pending = max(0, self.num_pending - 1)
        self.num_computed = self.length - 1
        if logprobs is not None:
            self.logprobs += logprobs[: len(tokens)]
        return reason

    def finished(self, reason: Reason) -> Finished:
        """Return what the request has come to, once it ends for that reason."""
        params = self.request.params
        return Finished(
            id=self.request.id,
            prompt=self.request.prompt,
            tokens=tuple(self.generated),
            reason=reason,
            arrival_s=self.arrival_s,
            token_times_s=tuple(self.token_times_s),
            logprobs=tuple(self.logprobs) if params.logprobs else None,
            top_logprobs=tuple(self.top_logprobs) if params.top_logprobs else None,
            admitted_s=self.admitted_s,
            cached_tokens=self.cached_tokens,
        )

    def _until_end(self, tokens: list[int], eos: frozenset[int]) -> tuple[list[int], Reason | None]:
        tokens = tokens[: self.num_left]
        stops = (
            []
            if self.request.params.ignore_eos
            else [place for place, token in enumerate(tokens) if token in eos]
        )
        if stops:
            return tokens[: stops[0] + 1], "stop"
        return tokens, "length" if len(tokens) == self.num_left else None
