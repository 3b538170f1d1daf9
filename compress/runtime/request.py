"""The facts that callers exchange with the engine: sampling parameters, requests and finished requests."""

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

from compress.errors import UsageError
from compress.models.arch import Arch

Reason = Literal["stop", "length", "cancelled", "deadline"]
"""Why a request ended: with an end-of-sequence token, with `max_tokens` tokens, by `Engine.cancel`, or at its
deadline, with the tokens it had by then."""
MAX_TOP_LOGPROBS = 20
TopLogprobs = tuple[tuple[int, float], ...]
"""The likeliest tokens of a position and their log probabilities, likeliest first."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 filter nothing.

    `min_p` keeps tokens at least `min_p` times as likely as the likeliest one (arXiv 2407.01082), `top_p`
    the smallest set of likeliest tokens whose probability reaches `top_p` (arXiv 1904.09751). `logprobs`
    asks for the log probability of each chosen token under the unfiltered softmax, and `top_logprobs` for
    those of so many of the likeliest tokens at its position. While a request asks for the latter, no step
    is launched ahead.

    Raises:
        UsageError: a value is out of range, or of another type.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        kinds = (
            (Integral, "a whole number", ("max_tokens", "top_k", "top_logprobs", "seed")),
            (Real, "a number", ("temperature", "top_p", "min_p")),
        )
        for kind, wanted, names in kinds:
            for name in names:
                value = getattr(self, name)
                if not isinstance(value, kind) or isinstance(value, bool):
                    raise UsageError(f"sampling parameter {name} is {value!r:.60}; it must be {wanted}.")
        rules = (
            ("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1"),
            (
                "temperature",
                self.temperature,
                0.0 <= self.temperature < float("inf"),
                "0 (greedy) or a positive number",
            ),
            ("top_k", self.top_k, 0 <= self.top_k < 1 << 31, "0 (off) or a count below 2^31"),
            ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0 and at most 1 (off)"),
            ("min_p", self.min_p, 0.0 <= self.min_p < 1.0, "at least 0 (off) and below 1"),
            (
                "top_logprobs",
                self.top_logprobs,
                0 <= self.top_logprobs <= (MAX_TOP_LOGPROBS if self.logprobs else 0),
                f"at most {MAX_TOP_LOGPROBS}, and 0 without logprobs",
            ),
            ("seed", self.seed, 0 <= self.seed < 1 << 63, "in [0, 2^63)"),
        )
        for name, value, holds, meaning in rules:
            if not holds:
                raise UsageError(f"sampling parameter {name} is {value}; it must be {meaning}.")


@dataclass(frozen=True)
class Request:
    """Prompt tokens and how to continue them. The caller chooses `id`, unique among unfinished requests.

    Requests of a lower `priority` are admitted first. A request that is unfinished at `deadline_s`, a
    moment of `time.perf_counter`, ends there with what it has. Requests of one `group` that have the same
    prompt compute it once, where they are admitted before it is computed: several completions of one prompt.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    deadline_s: float | None = None
    group: str | None = None

    def check(self, arch: Arch, *, max_model_len: int) -> None:
        """Refuse a request that an engine of this size does not serve, of a model of these shapes.

        Raises:
            UsageError: the prompt is empty, too long with its continuation, or holds unknown tokens.
        """
        prompt = self.prompt
        length = len(prompt) + self.params.max_tokens
        if not prompt:
            raise UsageError(
                f"request '{self.id}' has an empty prompt; give at least one token (the "
                "beginning-of-sequence token if nothing else)."
            )
        if length > max_model_len:
            limit = (
                f"this model has {arch.max_position} positions. Shorten it."
                if max_model_len >= arch.max_position
                else f"this engine holds sequences of {max_model_len} tokens at most. Shorten it, or raise "
                "max_model_len or kv_cache_bytes."
            )
            raise UsageError(
                f"request '{self.id}' has {len(prompt)} prompt tokens and asks for {self.params.max_tokens} "
                f"more, {length} in all; {limit}"
            )
        if min(prompt) < 0 or max(prompt) >= arch.vocab_size:
            raise UsageError(
                f"request '{self.id}' has a token outside 0..{arch.vocab_size - 1}: the tokenizer is another "
                "model's."
            )


@dataclass(frozen=True)
class Finished:
    """The result of a request. `tokens` include the end-of-sequence token if one ended it (`reason` "stop").

    Times are `time.perf_counter` seconds: `arrival_s` of the call of `Engine.add`, `admitted_s` of the step
    that first took it from the queue (None: none did), `token_times_s` of the moments at which the host had
    each token, after synchronization with the device. `cached_tokens` of the prompt were taken from the
    prefix cache.
    """

    id: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    reason: Reason
    arrival_s: float
    token_times_s: tuple[float, ...]
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    admitted_s: float | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class EngineCounts:
    """The requests and positions that an engine holds at a moment, and counts since it was made.

    `reserved_positions` of the `cache_positions` are in blocks of requests, and `live_tokens` of those hold
    keys and values: the ratio of the last two is the utilization of the cache. `prefix_queried` and
    `prefix_hits` count prompt tokens, `shared_prompts` requests whose prompt another of their group computed,
    and `copied_blocks` the partly filled blocks that were copied when one of them wrote to it.
    """

    num_running: int
    num_waiting: int
    cache_positions: int
    reserved_positions: int
    live_tokens: int
    prefix_queried: int
    prefix_hits: int
    evictions: int
    preemptions: int
    swapped_out: int
    swapped_in: int
    shared_prompts: int = 0
    copied_blocks: int = 0
