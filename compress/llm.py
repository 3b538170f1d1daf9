"""LLM: a loaded model that takes text and returns text. Tokenizing, chat templates, stop strings and
streaming are here; batching and the model are the engine's.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from compress.data.chat import ChatTemplate, Message, is_conversation, load_chat_template
from compress.data.continuation import Continuation
from compress.data.end_tokens import generation_end_ids
from compress.data.model_tokens import prepended_bos
from compress.data.tokenizer import encode, load_tokenizer
from compress.errors import UsageError
from compress.runtime.engine import Engine
from compress.runtime.prompt_logprobs import score_prompt
from compress.runtime.request import Finished, Request
from compress.runtime.request import SamplingParams as EngineParams
from compress.runtime.speculative.speculation import Acceptance

Prompt = str | Sequence[Message]
"""Text to continue, or a conversation to answer: a list of messages `{"role": ..., "content": ...}`."""


@dataclass(frozen=True)
class SamplingParams(EngineParams):
    """How tokens are chosen, and where a text ends.

    `max_tokens` bounds the generated tokens. `temperature` 0 takes the likeliest token; above it, tokens are
    drawn, filtered by `top_k` (0: off), `top_p` (1: off) and `min_p` (0: off), and the same `seed` gives the
    same text. A text ends before the first of the `stop` strings, which is not part of it, or with the
    model's end-of-sequence token, unless `ignore_eos`. With `logprobs` the output has the log probability of
    every token.

    Example:
        SamplingParams(max_tokens=64, temperature=0.8, top_p=0.95, stop=("\\n\\n",))

    Raises:
        UsageError: a value is out of range, or of another type.
    """

    max_tokens: int = 256
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        is_list = isinstance(self.stop, Iterable) and not isinstance(self.stop, str)
        strings = tuple(self.stop) if is_list else (self.stop,)
        if not all(isinstance(each, str) and each for each in strings):
            raise UsageError("sampling parameter stop is a text, or a list of texts, none of them empty.")
        object.__setattr__(self, "stop", strings)


@dataclass(frozen=True)
class Timing:
    """Times of one generation in milliseconds, the wait for other requests included.

    `ttft_ms` is the time to the first token; `tpot_ms` the mean time of each later one, None where there is
    none; `total_ms` the time to the last one.
    """

    ttft_ms: float
    tpot_ms: float | None
    total_ms: float


@dataclass(frozen=True)
class Output:
    """A generated text. `token_ids` are the generated tokens, an end-of-sequence token included.

    `finish_reason` is "stop" (a stop string or the end-of-sequence token) or "length" (`max_tokens`).
    `logprobs`, where they were asked for, has the log probability of each token.
    """

    prompt: Prompt
    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    timing: Timing
    num_prompt_tokens: int
    logprobs: tuple[float, ...] | None = None

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second, the time to the first token included."""
        return len(self.token_ids) / self.timing.total_ms * 1e3


@dataclass(frozen=True)
class Score:
    """How well a model predicts a text.

    `logprobs[i]` is the natural logarithm of the probability of `token_ids[i + 1]` after the tokens before
    it. `token_ids` begin with the beginning-of-sequence token where the model's tokenizer adds one.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def mean_nll(self) -> float:
        """The mean negative log probability of a token, in nats."""
        return -math.fsum(self.logprobs) / len(self.logprobs)

    @property
    def perplexity(self) -> float:
        """The exponential of `mean_nll`."""
        return math.exp(self.mean_nll)


class Stream(Iterator[str]):
    """The text of one generation, piece by piece as it is generated; every piece is whole characters.

    `output` is the whole output, once the last piece was read. A stream that is closed or dropped early ends
    its generation.
    """

    def __init__(self, llm: "LLM", generation: "_Generation") -> None:
        self._llm = llm
        self._generation = generation
        self._open = True

    @property
    def output(self) -> Output:
        """The whole output: text, tokens, reason and times.

        Raises:
            UsageError: the stream was not read to its end.
        """
        if self._generation.output is None:
            raise UsageError("this stream has not ended yet: read all its pieces, then take its output.")
        return self._generation.output

    def close(self) -> None:
        """End the generation, if it has not ended yet."""
        if self._open:
            self._open = False
            self._llm._drop([self._generation])

    def __next__(self) -> str:
        while self._open and self._generation.output is None:
            if piece := self._llm._advance(self._generation):
                return piece
        raise StopIteration

    def __del__(self) -> None:
        self.close()


class LLM:
    """A loaded model with its tokenizer: text in, text out. `load` makes one; use it from one thread.

    `engine` is the engine that serves it, for callers that work with token ids; `tokenizer` the model's
    tokenizer (`tokenizers.Tokenizer`); `chat_template` its chat template, None where it has none; `end_ids`
    are all its end-of-sequence tokens.
    """

    def __init__(self, engine: Engine, model_dir: Path) -> None:
        self.engine = engine
        self.tokenizer, _ = load_tokenizer(model_dir)
        self.chat_template: ChatTemplate | None = load_chat_template(model_dir)
        self._bos = prepended_bos(self.tokenizer, model_dir)
        engine_ends = frozenset(engine.arch.eos_token_ids)
        self.end_ids = engine_ends | generation_end_ids(model_dir)
        self._has_more_ends = self.end_ids != engine_ends
        self._num_requests = 0
        self._finished: dict[str, Finished] = {}

    @property
    def acceptance(self) -> Acceptance | None:
        """How many proposed tokens were kept since the model was loaded; None without speculation."""
        return self.engine.acceptance

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """Generate one text for each prompt, all of them batched, and return them in the order of the
        prompts.

        `prompts` is a text, a conversation (a list of messages), or a list of either; `params` are for all
        prompts, or one for each.

        Example:
            llm.generate(["def add(a, b):", "import "], SamplingParams(max_tokens=32))
            llm.generate([{"role": "user", "content": "Hello"}])

        Raises:
            UsageError: a prompt is empty or too long with its `max_tokens`, or a conversation and the model
                has no chat template.
        """
        every = _as_prompts(prompts)
        generations = self._start(every, _as_params(params, len(every)))
        try:
            while any(each.output is None for each in generations):
                self._step()
                for each in generations:
                    if each.request.id in self._finished or (each.may_stop and each.output is None):
                        self._read(each)
        finally:
            self._drop(generations)
        return [each.output for each in generations if each.output is not None]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Generate one text and return its pieces as they come.

        Example:
            for piece in llm.stream("Once upon a time"):
                print(piece, end="", flush=True)

        Raises:
            UsageError: as `generate`.
        """
        (generation,) = self._start([prompt], [params or SamplingParams()])
        return Stream(self, generation)

    def score(self, texts: str | Sequence[str]) -> list[Score]:
        """Return the log probability of every token of each text, in one pass over the text.

        Example:
            print(llm.score("def add(a, b):\\n    return a + b")[0].perplexity)

        Raises:
            UsageError: a text has no token after its first, or more than the engine's longest sequence.
        """
        return [self._score(text) for text in ([texts] if isinstance(texts, str) else texts)]

    def encode(self, prompt: Prompt, *, variables: Mapping[str, Any] | None = None) -> list[int]:
        """Return the token ids of a prompt as `generate` feeds them: a beginning-of-sequence token is added
        to text where the model's tokenizer adds one, and a conversation is rendered by the chat template,
        which brings its own. `variables` are further names that the template reads.

        Raises:
            UsageError: the model has no chat template, or the template refuses the messages.
        """
        if isinstance(prompt, str):
            return ([] if self._bos is None else [self._bos]) + self._ids(prompt)
        if self.chat_template is None:
            raise UsageError(
                "this model has no chat template, so it cannot answer a conversation: give it text to "
                "continue."
            )
        return self._ids(self.chat_template.render(prompt, **(variables or {})))

    def continuation(self, prompt: Sequence[int], params: SamplingParams) -> Continuation:
        """Return the text that continues a prompt, before its first token."""
        end_ids = frozenset[int]() if params.ignore_eos else self.end_ids
        return Continuation(self.tokenizer, prompt=prompt, stop=params.stop, end_ids=end_ids)

    def may_stop(self, params: SamplingParams) -> bool:
        """Return whether a text may end by what the engine does not look at: a stop string or a further
        end-of-sequence token.
        """
        return bool(params.stop) or (self._has_more_ends and not params.ignore_eos)

    def _ids(self, text: str) -> list[int]:
        return encode(self.tokenizer, [text])[0]

    def _start(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> "list[_Generation]":
        """Queue all prompts, or none where one of them is refused."""
        generations: list[_Generation] = []
        try:
            for prompt, each in zip(prompts, params, strict=True):
                self._num_requests += 1
                request = Request(f"llm-{self._num_requests}", tuple(self.encode(prompt)), each)
                self.engine.add(request)
                text = self.continuation(request.prompt, each)
                generations.append(_Generation(prompt, request, text, self.may_stop(each)))
        except BaseException:
            self._drop(generations)
            raise
        return generations

    def _advance(self, generation: "_Generation") -> str:
        """Run one step of the engine and return the text that it gave this generation."""
        self._step()
        return self._read(generation)

    def _step(self) -> None:
        self._finished |= {each.id: each for each in self.engine.step()}

    def _read(self, generation: "_Generation") -> str:
        """Return the text of the tokens that have come since the last call; sets the output where they end
        it.
        """
        request = generation.request
        finished = self._finished.pop(request.id, None)
        if finished is None:
            tokens = self.engine.tokens_of(request.id, start=generation.num_read)
        else:
            tokens = list(finished.tokens[generation.num_read :])
        generation.num_read += len(tokens)
        piece = generation.text.feed(tokens, last=finished is not None)
        if (reason := generation.text.reason) is None:
            return piece
        finished = finished or self.engine.cancel(request.id)
        generation.output = _output(generation, finished, generation.text.num_tokens, reason)
        return piece

    def _drop(self, generations: "Sequence[_Generation]") -> None:
        """Take unfinished generations out of the engine."""
        for each in generations:
            if each.output is None and self._finished.pop(each.request.id, None) is None:
                self.engine.cancel(each.request.id)

    def _score(self, text: str) -> Score:
        ids = self.encode(text)
        if len(ids) < 2:
            raise UsageError(
                f"a text of {len(ids)} tokens cannot be scored: nothing predicts its first token."
            )
        return Score(text, tuple(ids), score_prompt(self.engine, ids).logprobs)


@dataclass
class _Generation:
    """One prompt on its way through the engine; `num_read` of its tokens were taken from there."""

    prompt: Prompt
    request: Request
    text: Continuation
    may_stop: bool
    num_read: int = 0
    output: Output | None = None


def _output(
    generation: _Generation, finished: Finished, num_tokens: int, reason: Literal["stop", "length"]
) -> Output:
    times_s = finished.token_times_s[:num_tokens]
    first_s = times_s[0] - finished.arrival_s
    rest_s = times_s[-1] - times_s[0]
    tpot_ms = rest_s / (num_tokens - 1) * 1e3 if num_tokens > 1 else None
    return Output(
        prompt=generation.prompt,
        text=generation.text.text,
        token_ids=finished.tokens[:num_tokens],
        finish_reason=reason,
        timing=Timing(first_s * 1e3, tpot_ms, (first_s + rest_s) * 1e3),
        num_prompt_tokens=len(generation.request.prompt),
        logprobs=None if finished.logprobs is None else finished.logprobs[:num_tokens],
    )


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or is_conversation(prompts):
        return [prompts]  # type: ignore[list-item]  # a conversation
    is_list = isinstance(prompts, Iterable) and not isinstance(prompts, bytes | Mapping)
    every = list(prompts) if is_list else [prompts]
    wrong = [each for each in every if not isinstance(each, str) and not is_conversation(each)]
    if wrong:
        raise UsageError(
            f"a prompt is a text or a list of messages with role and content, not {wrong[0]!r:.60}."
        )
    return every  # type: ignore[return-value]


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise UsageError(f"sampling parameters are SamplingParams, or a list of them, not {params!r:.60}.")
    if len(params) != num_prompts:
        raise UsageError(
            f"{len(params)} sampling parameters were given for {num_prompts} prompts; give one, or one for "
            f"each."
        )
    return list(params)
