"""A model that takes text: an engine with the tokenizer of its directory. Texts are scored and continued in
batches of the engine's own.

A context and its continuation are encoded as one text and cut where the context alone ends, after trailing
spaces of the context have been moved to the continuation, as EleutherAI's harness does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from compress.data.chat import ChatTemplate, Messages, load_chat_template
from compress.data.continuation import Continuation
from compress.data.end_tokens import generation_end_ids
from compress.data.model_tokens import prepended_bos, stated_bos
from compress.data.tokenizer import decode, encode, load_tokenizer
from compress.errors import UsageError
from compress.runtime.continuation_logprobs import ContinuationLogprob, Pair, score_continuations
from compress.runtime.engine import Engine
from compress.runtime.request import Finished, Request, SamplingParams


@dataclass(frozen=True)
class Continued:
    """A generated text and its tokens up to the end; "stop" ended it, or "length" the number of tokens."""

    text: str
    tokens: tuple[int, ...]
    reason: Literal["stop", "length"]


@dataclass
class _Open:
    """A text that is being generated; `num_read` of its tokens were taken from the engine."""

    idx: int
    continuation: Continuation
    num_read: int = 0


class TextModel:
    """The engine, tokenizer and chat template of a model directory.

    Raises:
        UnsupportedFormat: the tokenizer cannot be read.
    """

    def __init__(self, engine: Engine, model_dir: Path) -> None:
        self.engine = engine
        self.tokenizer, self.tokenizer_digest = load_tokenizer(model_dir)
        self.chat_template: ChatTemplate | None = load_chat_template(model_dir)
        self._bos = prepended_bos(self.tokenizer, model_dir)
        self.end_ids = frozenset(engine.arch.eos_token_ids) | generation_end_ids(model_dir)
        begins = (self._bos, *stated_bos(self.tokenizer, model_dir))
        ends = (*begins, *engine.arch.eos_token_ids, *sorted(self.end_ids))
        self._first = next((each for each in ends if isinstance(each, int)), None)

    @property
    def first_id(self) -> int:
        """The token before a text that has no context: the beginning-of-sequence token, or else the end of
        one.

        Raises:
            UsageError: the model has neither.
        """
        if self._first is None:
            raise UsageError(
                "the model states no beginning- or end-of-sequence token, so a text without a context "
                "cannot be "
                "scored; give every item a question."
            )
        return self._first

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Return the ids of a text, after a beginning-of-sequence token where the tokenizer adds one and
        the text does not begin with one."""
        ids = encode(self.tokenizer, [text])[0]
        bos = self._bos if add_bos else None
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""
        return decode(self.tokenizer, ids, skip_special_tokens=skip_special_tokens)

    def render(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """Return a conversation as the model's chat template writes it.

        Raises:
            UsageError: the model has no chat template.
        """
        if self.chat_template is None:
            raise UsageError("this model has no chat template; leave `chat: true` out of the task.")
        return self.chat_template.render(messages, add_generation_prompt=add_generation_prompt)

    def encode_pair(self, context: str, continuation: str) -> Pair:
        """Return the ids of a context and of its continuation.

        Raises:
            UsageError: the continuation adds no token.
        """
        if not context:
            ids = self.encode(continuation, add_bos=False)
            pair = (ids[:1], ids[1:]) if ids[:1] == [self.first_id] else ([self.first_id], ids)
        else:
            kept = context.rstrip()
            continuation = context[len(kept) :] + continuation
            start = self.encode(kept) or [self.first_id]
            whole = self.encode(kept + continuation)
            pair = start, whole[len(start) :]
            if continuation and len(whole) > 1 and not pair[1]:
                pair = whole[:-1], whole[-1:]  # one token holds the end of the context and the continuation
        if not pair[1]:
            raise UsageError(f"the answer {continuation!r:.60} adds no token to its question.")
        return pair

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[ContinuationLogprob]:
        """Return how likely each continuation is after its context.

        Raises:
            UsageError: as `encode_pair`, or a continuation is longer than the engine's longest sequence.
        """
        return score_continuations(self.engine, [self.encode_pair(*each) for each in pairs])

    def generate(
        self,
        prompts: Sequence[str],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        stop: Sequence[str] = (),
    ) -> list[Continued]:
        """Return one continuation a prompt, up to a stop string, the end of the sequence or `max_tokens`. A
        prompt that is too long for the engine loses its beginning.

        Raises:
            UsageError: `max_tokens` alone is more than the engine's longest sequence.
        """
        every = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        ids = [
            self._room(self.encode(text) or [self.first_id], one)
            for text, one in zip(prompts, every, strict=True)
        ]
        found: list[Continued | None] = [None] * len(prompts)
        running: dict[str, _Open] = {}
        for idx, (prompt, one) in enumerate(zip(ids, every, strict=True)):
            self.engine.add(Request(f"text-{idx}", tuple(prompt), one))
            ends = frozenset[int]() if one.ignore_eos else self.end_ids
            running[f"text-{idx}"] = _Open(
                idx, Continuation(self.tokenizer, prompt=prompt, stop=stop, end_ids=ends)
            )
        while running:
            finished = {each.id: each for each in self.engine.step()}
            for request_id, each in list(running.items()):
                if (ended := self._read(request_id, each, finished.get(request_id))) is not None:
                    found[each.idx] = ended
                    del running[request_id]
        return [each for each in found if each is not None]

    def _read(self, request_id: str, own: _Open, finished: Finished | None) -> Continued | None:
        """Feed the tokens that have come; return the text once it has ended."""
        tokens = (
            self.engine.tokens_of(request_id, start=own.num_read)
            if finished is None
            else finished.tokens[own.num_read :]
        )
        own.num_read += len(tokens)
        own.continuation.feed(tokens, last=finished is not None)
        if (reason := own.continuation.reason) is None:
            return None
        finished = finished or self.engine.cancel(request_id)
        return Continued(own.continuation.text, finished.tokens[: own.continuation.num_tokens], reason)

    def _room(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """Return the end of a prompt that leaves room for its continuation."""
        room = self.engine.max_model_len - params.max_tokens
        if room < 1:
            raise UsageError(
                f"max_tokens {params.max_tokens} leaves no token for a prompt: this model holds sequences of "
                f"{self.engine.max_model_len} tokens. Ask for fewer."
            )
        return prompt[-room:]
