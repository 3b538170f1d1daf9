"""Chat: lists of messages `{role, content}` become one text, by the template that came with a model or as a
plain transcript.

A chat template is a Jinja program that anybody may have written, so it runs in Jinja's immutable sandbox,
with the names that templates for `transformers` expect: `messages`, `add_generation_prompt`, `tools`,
`documents`, the model's special tokens, and the functions `raise_exception`, `strftime_now` and `tojson`. A
template is found, in this order,

    chat_template.jinja                  the default template
    additional_chat_templates/*.jinja    further templates, by the file's name
    tokenizer_config.json                `chat_template`: a text, or a list of {name, template}; the default
    is called "default"

as `transformers` looks for it. Text from a template already holds the beginning-of-sequence token, where the
model wants one.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import If, Name, Node, Output, TemplateData
from jinja2.parser import Parser
from jinja2.utils import Namespace

from compress.data.template_limits import LimitedEnvironment, limited_steps
from compress.errors import UnsupportedFormat, UsageError, did_you_mean
from compress.untrusted.files import check_within, read_text
from compress.untrusted.parse import Malformed, read_json

Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}`; templates may read further keys, such as `tool_calls`."""
Messages = Sequence[Message]

DEFAULT_TEMPLATE = "default"
MARKS = ("\ufdd0", "\ufdd1")
"""Characters before and after a marked text: two that Unicode reserves for use within a program."""
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
_CONFIG_FILE = "tokenizer_config.json"
_MAX_BYTES = 64 << 20
_SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RuntimeError,  # RecursionError, and what filters and globals of Jinja raise
)
"""Errors that a template raises when it runs: its own, and those of the operations in it."""


@dataclass(frozen=True)
class ChatTemplate:
    """A model's chat template with the special tokens it may name (`bos_token`, `eos_token`, ...)."""

    source: str
    special_tokens: Mapping[str, str]

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation; with `add_generation_prompt` it ends where the assistant's
        answer begins.

        `tools` are JSON schemas of functions; `variables` are further names that this template reads
        (`enable_thinking`, ...).

        Raises:
            UsageError: the messages are not messages, or the template refuses them.
            UnsupportedFormat: the template is not valid Jinja.
        """
        check_messages(messages)
        names = {"tools": None, "documents": None, **self.special_tokens, **variables}
        if tools is not None:
            names["tools"] = list(tools)
        try:
            program = self._program
            with limited_steps():
                return program.render(
                    messages=[dict(each) for each in messages],
                    add_generation_prompt=add_generation_prompt,
                    **names,
                )
        except _TEMPLATE_ERRORS as error:
            raise UsageError(f"the model's chat template refuses these messages: {error}") from error

    @property
    def marks_answers(self) -> bool:
        """Whether the template itself marks the assistant's words, by generation blocks."""
        return _GENERATION.search(self.source) is not None

    @cached_property
    def _program(self) -> jinja2.Template:
        environment = LimitedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
        )
        environment.add_filter("tojson", _tojson)
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _PublicNamespace,
        }
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise UnsupportedFormat(
                f"line {error.lineno} of the model's chat template is not valid Jinja: {error.message}"
            ) from error
        except SyntaxError as error:  # of the Python that Jinja made of it
            raise UnsupportedFormat(f"the model's chat template is not valid Jinja: {error.msg}") from error


def load_chat_template(model_dir: Path, name: str | None = None) -> ChatTemplate | None:
    """Return the chat template in a model directory, the default one or the one called `name`; None where a
    model has no default one.

    Raises:
        UsageError: there is no template of that name.
        UnsupportedFormat: a file of the tokenizer is not JSON.
    """
    config = _read_json(model_dir / _CONFIG_FILE)
    templates = _templates(model_dir, config.get("chat_template"))
    if name is not None and name not in templates:
        raise UsageError(
            f"'{model_dir}' has no chat template called '{name}'.{did_you_mean(name, templates)}"
        )
    source = templates.get(name or DEFAULT_TEMPLATE)
    if source is None:
        return None
    return ChatTemplate(source, special_tokens(model_dir))


def special_tokens(model_dir: Path) -> dict[str, str]:
    """Return the special tokens that a tokenizer's files name, such as `bos_token`, each as text.

    Raises:
        UnsupportedFormat: a file of the tokenizer is not JSON.
    """
    stated = {**_read_json(model_dir / _SPECIAL_TOKENS_FILE), **_read_json(model_dir / _CONFIG_FILE)}
    tokens = {}
    for name, value in stated.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def transcript(messages: Messages) -> str:
    """Return a conversation as paragraphs `Role: content`: the plain form that needs no model, for text of a
    data card. A message that is nothing but calls of tools is left out.

    Raises:
        UsageError: a role is no text, or a content neither text nor a list of parts that are texts.
    """
    check_messages(messages)
    spoken = [each for each in messages if each["content"] is not None or not each.get("tool_calls")]
    return "\n\n".join(f"{_role(each).capitalize()}: {_plain(each['content'])}" for each in spoken)


def _role(message: Message) -> str:
    if not isinstance(message["role"], str):
        raise UsageError(f'the role of a message is text, such as "user", not {message["role"]!r:.40}.')
    return message["role"]


def _plain(content: Any) -> str:
    """Return the text of a message's content: a text, or parts such as {"type": "text", "text": "Hello"}."""
    parts = [{"text": content}] if isinstance(content, str) else content
    texts = [each.get("text") if isinstance(each, Mapping) else None for each in _listed(parts)]
    if not texts or not all(isinstance(each, str) for each in texts):
        raise UsageError(
            "the content of a message is text, or a list of parts that are all text, such as "
            f'{{"type": "text", "text": "Hello"}}, not {content!r:.80}.'
        )
    return "\n".join(map(str, texts))


def _listed(parts: Any) -> list[Any]:
    return list(parts) if isinstance(parts, list | tuple) else []


def is_conversation(value: object) -> bool:
    """Return whether a value is a non-empty list of messages with role and content."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and bool(value)
        and all(isinstance(each, Mapping) and {"role", "content"} <= each.keys() for each in value)
    )


def check_messages(messages: object) -> None:
    """Raise UsageError unless the value is a conversation."""
    if not is_conversation(messages):
        raise UsageError(
            'a conversation is a list of messages, each with role and content: [{"role": "user", "content": '
            '"Hello"}].'
        )


def _templates(model_dir: Path, stated: Any) -> dict[str, str]:
    """Return all templates by name; files have precedence over the config."""
    templates: dict[str, str] = {}
    if isinstance(stated, str):
        templates[DEFAULT_TEMPLATE] = stated
    elif isinstance(stated, list):
        for each in stated:
            fields = each if isinstance(each, dict) else {}
            name = fields.get("name")
            template = fields.get("template")
            if not isinstance(name, str) or not isinstance(template, str):
                raise UnsupportedFormat(
                    f"'{model_dir / _CONFIG_FILE}' has a chat_template that is not a text or a list of "
                    "{name, template}."
                )
            templates[name] = template
    folder = model_dir / TEMPLATE_FOLDER
    files = {path.stem: path for path in sorted(folder.glob("*.jinja"))} if folder.is_dir() else {}
    if (model_dir / TEMPLATE_FILE).exists():
        files[DEFAULT_TEMPLATE] = model_dir / TEMPLATE_FILE
    for path in files.values():
        check_within(model_dir, path)
    return templates | {name: read_text(path, max_bytes=_MAX_BYTES) for name, path in files.items()}


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    check_within(file.parent, file)
    try:
        content = read_json(file, max_bytes=_MAX_BYTES)
    except Malformed as error:
        raise UnsupportedFormat(f"'{file}' is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


# ------------------------------------------------------------------------------------------------- what
# templates may call


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _PublicNamespace(Namespace):
    """A namespace whose names must not begin with an underscore: those are how a template would reach
    Python's internals.
    """

    def __init__(self, *args: Any, **names: Any) -> None:
        for name in dict(*args, **names):
            _check_public(name)
        super().__init__(*args, **names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.TemplateError(f"a name in a namespace begins with an underscore: '{name}'")


class _GenerationBlocks(Extension):
    """Reads `{% generation %} ... {% endgeneration %}`, which marks the assistant's words for training, as
    its content alone; between `MARKS`, where the variable `mark_generation` is true.
    """

    tags: ClassVar = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        line = next(parser.stream).lineno
        content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (
            If(
                Name("mark_generation", "load"),
                [Output([TemplateData(mark)], lineno=line)],
                [],
                [],
                lineno=line,
            )
            for mark in MARKS
        )
        return [begin, *content, end]
