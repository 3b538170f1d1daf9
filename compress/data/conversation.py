"""Conversations of a data card: read from a row, and rendered by a model's chat template.

A row holds its conversation in `text_field` as a list of messages (in csv as their JSON), or in one field for
each turn. Until a model is known a conversation is a document whose text is JSON, so that its digest does
not depend on a template.

    {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.data.answers import ASSISTANT, answer_spans
from compress.data.card_spec import ChatShape
from compress.data.chat import ChatTemplate
from compress.data.corpus import Document
from compress.errors import UsageError, did_you_mean
from compress.untrusted.parse import Malformed, parse_json


@dataclass(frozen=True)
class ChatRenderer:
    """A model's chat template. `beginning` is text that the model's windows begin with in any case: it is
    left out where a rendered text begins with it, or the window would have it twice."""

    template: ChatTemplate
    beginning: str = ""

    def document(self, stored: Document, shape: ChatShape) -> Document | None:
        """Return a conversation as text, with its answers where only they count; None where it has too few
        messages, or no answer and nothing else counts.

        Raises:
            UsageError: the template refuses the messages, or hides where an answer is; names the document.
        """
        fields = parse_json(stored.text, as_python=True)
        messages = list(fields["messages"])
        if shape.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": shape.system})
        if len(messages) < shape.min_turns:
            return None
        variables = {**shape.variables, "tools": fields.get("tools")}
        try:
            text = self.template.render(messages, add_generation_prompt=False, **variables)
            counted = None
            if shape.count == "answers":
                if not any(message["role"] == ASSISTANT for message in messages):
                    return None
                counted = answer_spans(self.template, messages, text, **variables)
        except UsageError as error:
            raise UsageError(f"conversation '{stored.id}': {error}") from error
        skipped = len(self.beginning) if self.beginning and text.startswith(self.beginning) else 0
        if counted is not None:
            counted = tuple((max(0, begin - skipped), end - skipped) for begin, end in counted)
        return Document(stored.id, text[skipped:], counted)


def conversation_text(row: Mapping[str, Any], text_field: str, shape: ChatShape, at: str) -> str:
    """Return the conversation of a row as JSON, its keys in the order of the row: templates write schemas of
    tools in it.

    Raises:
        UsageError: the row has no conversation there; `at` is the place of the row, for the message.
    """
    messages = _from_fields(row, shape.fields, at) if shape.fields else _listed(row, text_field, at)
    conversation: dict[str, Any] = {"messages": messages}
    if shape.tools_field is not None:
        tools = _parsed(_field(row, shape.tools_field, at), f"{at}: field '{shape.tools_field}'")
        if tools is not None and not isinstance(tools, list):
            raise UsageError(f"{at}: field '{shape.tools_field}' is no list of tools.")
        if tools:
            conversation["tools"] = _with_values(tools)
    try:
        return json.dumps(conversation, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{at}: the conversation holds what JSON does not: {error}.") from None


def _from_fields(row: Mapping[str, Any], fields: Mapping[str, str], at: str) -> list[dict[str, Any]]:
    """Return a message for each role whose field has a text."""
    texts = {role: _field(row, field, at) for role, field in fields.items()}
    for role, text in texts.items():
        if text is not None and not isinstance(text, str):
            raise UsageError(f"{at}: field '{fields[role]}' is not text.")
    messages = [{"role": role, "content": text} for role, text in texts.items() if text]
    if not messages:
        raise UsageError(f"{at}: the fields {', '.join(fields.values())} are empty.")
    return messages


def _listed(row: Mapping[str, Any], field: str, at: str) -> list[dict[str, Any]]:
    found = _parsed(_field(row, field, at), f"{at}: field '{field}'")
    if not isinstance(found, list) or not found:
        raise UsageError(f"{at}: field '{field}' is not a list of messages with role and content.")
    messages = []
    for message in found:
        kept = _with_values(message)
        if not isinstance(kept, dict) or not isinstance(kept.get("role"), str):
            raise UsageError(f"{at}: field '{field}' has a message without a role.")
        if "content" not in kept and "tool_calls" not in kept:
            raise UsageError(f"{at}: field '{field}' has a message without content.")
        if not isinstance(kept.get("content", ""), str | list):
            raise UsageError(f"{at}: field '{field}' has a message whose content is neither text nor a list.")
        messages.append({"content": "", **kept})
    return messages


def _with_values(value: Any) -> Any:
    """Return a value without the keys that have none: a column of a parquet file has every key in every
    row."""
    if isinstance(value, Mapping):
        return {key: _with_values(each) for key, each in value.items() if each is not None}
    return [_with_values(each) for each in value] if isinstance(value, list) else value


def _parsed(value: Any, what: str) -> Any:
    """Return the value, or what its JSON holds, if it is text."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value, as_python=True) if value.strip() else None
    except Malformed as error:
        raise UsageError(f"{what} is not JSON: {error}.") from None


def _field(row: Mapping[str, Any], field: str, at: str) -> Any:
    if field not in row:
        raise UsageError(f"{at}: the row has no field '{field}'.{did_you_mean(field, map(str, row))}")
    return row[field]
