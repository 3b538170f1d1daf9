"""The answers in a conversation that a chat template rendered: ranges of characters of its text.

An answer is what the model itself writes: from the end of the generation prompt to the end of the turn, with
tool calls and the token that ends the turn, without white space that the template puts after it. It is found

1. by the template's own generation blocks, where it has some;
2. else turn by turn. For messages m[0..i], of which m[i] is an answer,

       P = text of m[0..i-1] with a generation prompt,  Q = text of m[0..i],  answer = Q without P,

   if both are beginnings of the whole text;
3. else by marks around the content of every answer, if the text without the marks is the text that was
   rendered without them. Templates that drop earlier reasoning, or that write the system prompt into the last
   message, need this. It finds no tool calls.

A conversation that none of the three can read is refused: a guess would count words of the user as answers.
"""

from collections.abc import Sequence
from typing import Any

from compress.data.chat import MARKS, ChatTemplate, Message
from compress.data.corpus import Spans
from compress.errors import UsageError

ASSISTANT = "assistant"


def answer_spans(template: ChatTemplate, messages: Sequence[Message], text: str, **variables: Any) -> Spans:
    """Return the ranges of the answers in `text`, which is the template's text of all messages.

    Raises:
        UsageError: where an answer begins or ends is not certain.
    """
    turns = [idx for idx, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not turns:
        return ()
    if template.marks_answers:
        marked = template.render(messages, add_generation_prompt=False, mark_generation=True, **variables)
        return _refused_if_none(_between_marks(marked, text), "its generation blocks overlap")
    spans: list[tuple[int, int]] = []
    by_content: dict[int, tuple[int, int]] | None = None
    for turn in turns:
        span = _by_beginnings(template, messages, turn, text, variables)
        if span is None:
            if by_content is None:
                by_content = _by_content(template, messages, turns, text, variables)
            span = by_content.get(turn)
        if span is None or (spans and span[0] < spans[-1][1]):
            raise UsageError(
                f"message {turn} is an answer whose place in the text is not certain: the model's chat "
                "template changes earlier messages or this one. Set `count: all` in the card's `chat`."
            )
        spans.append(span)
    return tuple(spans)


def _refused_if_none(spans: Spans | None, reason: str) -> Spans:
    if spans is None:
        raise UsageError(
            f"the answers of the model's chat template are not certain: {reason}. Set `count: all` in the "
            "card's `chat`."
        )
    return spans


def _by_beginnings(
    template: ChatTemplate, messages: Sequence[Message], turn: int, text: str, variables: dict[str, Any]
) -> tuple[int, int] | None:
    """Return the range of the answer of a turn, None where a beginning of the conversation does not render as
    a beginning of the text."""
    if turn == 0:
        return None
    try:
        before = template.render(messages[:turn], add_generation_prompt=True, **variables)
        whole = template.render(messages[: turn + 1], add_generation_prompt=False, **variables)
    except UsageError:  # the template refuses conversations that end there
        return None
    if not (text.startswith(whole) and whole.startswith(before)):
        return None
    end = len(whole.rstrip())
    return (len(before), end) if end > len(before) else None


def _by_content(
    template: ChatTemplate,
    messages: Sequence[Message],
    turns: Sequence[int],
    text: str,
    variables: dict[str, Any],
) -> dict[int, tuple[int, int]]:
    """Return turn -> range of its content and of the end-of-text token after it; empty where the template
    does more to an answer than writing it."""
    written = [idx for idx in turns if _core(messages[idx]) and not messages[idx].get("tool_calls")]
    marked = [
        {**message, "content": _marked(message["content"])} if idx in written else message
        for idx, message in enumerate(messages)
    ]
    try:
        spans = _between_marks(template.render(marked, add_generation_prompt=False, **variables), text)
    except UsageError:
        return {}
    if spans is None or len(spans) != len(written):
        return {}
    end_token = template.special_tokens.get("eos_token", "")
    return {
        turn: (begin, end + _length_of(end_token, text[end:]))
        for turn, (begin, end) in zip(written, spans, strict=True)
    }


def _core(message: Message) -> str:
    content = message["content"]
    return content.strip() if isinstance(content, str) else ""


def _marked(content: str) -> str:
    """Return the content with marks inside of the white space around it, which templates strip."""
    begin = len(content) - len(content.lstrip())
    end = len(content.rstrip())
    return content[:begin] + MARKS[0] + content[begin:end] + MARKS[1] + content[end:]


def _length_of(token: str, rest: str) -> int:
    """Return the length of the token at the beginning of `rest`, with white space before it; 0 if it is not
    there."""
    blank = len(rest) - len(rest.lstrip())
    return blank + len(token) if token and rest.startswith(token, blank) else 0


def _between_marks(marked: str, text: str) -> Spans | None:
    """Return the ranges in `text` that are between marks in `marked`; None where the two differ otherwise, or
    the marks are not in pairs."""
    spans: list[tuple[int, int]] = []
    pieces: list[str] = []
    length = 0
    for idx, part in enumerate(marked.split(MARKS[0])):
        inside, mark, after = part.partition(MARKS[1])
        if bool(mark) != (idx > 0) or MARKS[1] in after:
            return None
        if idx:
            spans.append((length, length + len(inside)))
        pieces += [inside, after]
        length += len(inside) + len(after)
    return tuple(span for span in spans if span[1] > span[0]) if "".join(pieces) == text else None
