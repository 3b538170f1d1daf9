"""`/v1/completions`: prompts as text or token ids are continued, repeated (`echo`) or scored (`echo` with
`logprobs`).
"""

from typing import Any

from compress.data.token_text import TokenTexts
from compress.data.tokenizer import decode
from compress.llm import LLM
from compress.serve.ask import Ask, Prompt, check_lengths, check_sizes
from compress.serve.body_fields import (
    BodyFields,
    read_n,
    read_num_top,
    read_params,
    read_priority,
    read_stream,
)
from compress.serve.choice import Choice, Piece
from compress.serve.logprobs import CompletionLogprobs
from compress.serve.refusal import Refusal
from compress.serve.settings import ServerSettings

_DEFAULT_MAX_TOKENS = 16
_WANTED = "a text, a list of texts, a list of token ids, or a list of lists of token ids"


class Completions:
    """The endpoint that continues prompts."""

    path = "/v1/completions"
    id_prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"
    known = frozenset({"prompt", "echo"})

    def read(self, fields: BodyFields, llm: LLM, settings: ServerSettings) -> Ask:
        """Return what a body asks for."""
        echo = fields.flag("echo", default=False)
        max_tokens = fields.integer(
            "max_tokens", 0 if echo else 1, llm.engine.max_model_len, default=_DEFAULT_MAX_TOKENS
        )
        logprobs = fields.has("logprobs")
        num_top = read_num_top(fields, "logprobs")
        params = read_params(fields, max_tokens=max_tokens, logprobs=logprobs, top_logprobs=num_top)
        stream, include_usage = read_stream(fields)
        n = read_n(fields, settings.max_choices)
        prompts = _read_prompts(fields, llm, settings.max_choices)
        check_lengths(prompts, max_tokens, llm)
        ask = Ask(
            prompts,
            params if max_tokens else None,
            n=n,
            stream=stream,
            include_usage=include_usage,
            echo=echo,
            num_scored_top=num_top if echo and logprobs else None,
            priority=read_priority(fields),
        )
        check_sizes(ask, llm, settings)
        return ask

    def writer(self, ask: Ask, choice: Choice, texts: TokenTexts) -> "_Writer":
        """Return the writer of one choice."""
        return _Writer(ask, choice, texts)


class _Writer:
    def __init__(self, ask: Ask, choice: Choice, texts: TokenTexts) -> None:
        self._ask = ask
        self._choice = choice
        self._logprobs = CompletionLogprobs(texts)
        self._with_logprobs = ask.num_scored_top is not None or (
            ask.params is not None and ask.params.logprobs
        )

    def whole(self, piece: Piece) -> dict[str, Any]:
        opening = self.opening()
        choice = self.delta(piece)
        if opening is None:
            return choice
        parts = (opening["logprobs"], choice["logprobs"])
        return {
            **choice,
            "text": opening["text"] + choice["text"],
            "logprobs": _joined(*parts) if all(parts) else parts[0] or parts[1],
        }

    def opening(self) -> dict[str, Any] | None:
        if not self._ask.echo:
            return None
        prompt = self._choice.prompt
        logprobs = None
        if self._ask.num_scored_top is not None:
            scored = self._choice.prompt_logprobs
            values = [None] * (len(prompt.tokens) - 1) if scored is None else scored.logprobs
            top = scored.top if scored is not None and scored.top else [None] * len(values)
            logprobs = self._logprobs.write(prompt.tokens, [None, *values], [None, *top])
        return self._choice_of(prompt.text, logprobs, None)

    def delta(self, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self._with_logprobs and piece.tokens:
            top = piece.top_logprobs or [None] * len(piece.tokens)
            logprobs = self._logprobs.write(piece.tokens, piece.logprobs, top)
        return self._choice_of(piece.text, logprobs, piece.finish_reason)

    def _choice_of(
        self, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": self._choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return the log probabilities of a prompt and of its continuation as one object."""
    if first["top_logprobs"] is None and second["top_logprobs"] is not None:
        first = {**first, "top_logprobs": [None] * len(first["tokens"])}
    return {name: None if second[name] is None else first[name] + second[name] for name in first}


def _read_prompts(fields: BodyFields, llm: LLM, max_prompts: int) -> tuple[Prompt, ...]:
    """Return the prompts of a body, texts tokenized, token ids with their text.

    Raises:
        Refusal: there is none, too many, or one that is neither.
    """
    if not fields.is_list("prompt"):
        return (_of_text(fields.text("prompt"), llm),)
    items = fields.items("prompt")
    if not items:
        raise fields.wrong("prompt", [], f"{_WANTED}, not empty")
    if all(isinstance(each, str) for each in items) or all(isinstance(each, list) for each in items):
        if len(items) > max_prompts:
            raise Refusal(
                f"there are {len(items)} prompts; a request may have {max_prompts}.", param="prompt"
            )
        return tuple(
            _of_text(each, llm) if isinstance(each, str) else _of_ids(each, fields, llm) for each in items
        )
    return (_of_ids(items, fields, llm),)


def _of_text(text: str, llm: LLM) -> Prompt:
    return Prompt(tuple(llm.encode(text)), text)


def _of_ids(ids: list[Any], fields: BodyFields, llm: LLM) -> Prompt:
    limit = llm.engine.max_model_len
    if len(ids) > limit:
        raise Refusal(
            f"the prompt has {len(ids)} tokens; this server holds {limit} tokens at most.",
            param="prompt",
            code="context_length_exceeded",
        )
    last = llm.engine.arch.vocab_size - 1
    odd = [each for each in ids if type(each) is not int or not 0 <= each <= last]
    if odd:
        raise fields.wrong("prompt", odd[0], f"{_WANTED}; token ids are from 0 to {last}")
    return Prompt(tuple(ids), decode(llm.tokenizer, ids))
