"""`/v1/chat/completions`: a conversation is answered, by the model's own chat template."""

import re
from collections.abc import Mapping
from typing import Any

from compress.data.token_text import TokenTexts
from compress.llm import LLM, SamplingParams
from compress.serve.ask import Ask, Prompt, check_lengths, check_sizes, max_tokens_within
from compress.serve.body_fields import (
    BodyFields,
    read_n,
    read_num_top,
    read_params,
    read_priority,
    read_stream,
)
from compress.serve.choice import Choice, Piece
from compress.serve.logprobs import chat_logprobs
from compress.serve.refusal import Refusal
from compress.serve.settings import ServerSettings
from compress.untrusted.fields import shown

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_OWN_NAMES = frozenset({"messages", "add_generation_prompt", "tools", "documents", "self"})


class Chat:
    """The endpoint that answers conversations."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    known = frozenset(
        {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs", "reasoning_effort"}
    )

    def read(self, fields: BodyFields, llm: LLM, settings: ServerSettings) -> Ask:
        """Return what a body asks for."""
        limit = llm.engine.max_model_len
        name = "max_completion_tokens" if fields.has("max_completion_tokens") else "max_tokens"
        stated = fields.integer(name, 1, limit) if fields.has(name) else None
        logprobs = fields.flag("logprobs", default=False)
        num_top = read_num_top(fields, "top_logprobs")
        if num_top and not logprobs:
            raise Refusal("top_logprobs needs logprobs: true.", param="top_logprobs")
        stream, include_usage = read_stream(fields)
        n = read_n(fields, settings.max_choices)
        messages = _read_messages(fields)
        tokens = tuple(llm.encode(messages, variables=_variables(fields)))
        prompt = Prompt(tokens, "")
        check_lengths([prompt], stated or 1, llm)
        allowed = max_tokens_within(settings, num_choices=n, num_top=num_top)
        params: SamplingParams = read_params(
            fields,
            max_tokens=max(1, min(limit - len(tokens), allowed)) if stated is None else stated,
            logprobs=logprobs,
            top_logprobs=num_top,
        )
        ask = Ask(
            (prompt,),
            params,
            n=n,
            stream=stream,
            include_usage=include_usage,
            priority=read_priority(fields),
        )
        check_sizes(ask, llm, settings)
        return ask

    def writer(self, ask: Ask, choice: Choice, texts: TokenTexts) -> "_Writer":
        """Return the writer of one choice."""
        return _Writer(ask, choice, texts)


class _Writer:
    def __init__(self, ask: Ask, choice: Choice, texts: TokenTexts) -> None:
        self._index = choice.index
        self._texts = texts
        self._with_logprobs = ask.params is not None and ask.params.logprobs

    def whole(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text}
        return {
            "index": self._index,
            "message": message,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }

    def opening(self) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": self._index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return chat_logprobs(self._texts, piece.tokens, piece.logprobs, piece.top_logprobs)


def _read_messages(fields: BodyFields) -> list[dict[str, Any]]:
    """Return the conversation; contents in parts become one text.

    Raises:
        Refusal: it is empty, or a message has no role, or a content that is not text.
    """
    items = fields.items("messages")
    if not items:
        raise fields.wrong("messages", [], "a list of at least one message")
    return [_read_message(each, f"messages[{idx}]") for idx, each in enumerate(items)]


def _read_message(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
        raise Refusal(
            f"{where} is {shown(item)}; it must be an object with role and content.", param="messages"
        )
    content = item.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    if content is None and item.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise Refusal(
            f"{where} has content {shown(content)}; it must be a text, or a list of parts of type text.",
            param="messages",
        )
    return {**item, "content": content}


def _part(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise Refusal(
            f'{where} has a part {shown(part)}; only parts {{"type": "text", "text": ...}} are understood.',
            param="messages",
        )
    return text


def _variables(fields: BodyFields) -> dict[str, Any]:
    """Return the further names that a request gives the template.

    Raises: Refusal: one is no name, is the template's own, or has a value that is not text, number or truth
        value.
    """
    stated = dict(fields.mapping("chat_template_kwargs", default={}))
    if fields.has("reasoning_effort"):
        stated.setdefault("reasoning_effort", fields.text("reasoning_effort"))
    for name, value in stated.items():
        if not _NAME.fullmatch(name) or name in _OWN_NAMES or name.endswith("_token"):
            raise Refusal(
                f"chat_template_kwargs has {shown(name)}, which a request cannot set.",
                param="chat_template_kwargs",
            )
        if value is not None and not isinstance(value, bool | int | float | str):
            raise Refusal(
                f"chat_template_kwargs has {name} = {shown(value)}; it must be a text, a number, true or "
                "false.",
                param="chat_template_kwargs",
            )
    return stated
