"""Chat templates against `transformers`, and where they are looked for."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from compress.data.chat import ChatTemplate, load_chat_template, transcript
from compress.errors import StorageError, UnsupportedFormat, UsageError
from compress.registry.model_source import BUILTIN
from tests.support.hostile import make_fifo

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <b>1 + 1</b>?"},
    {"role": "assistant", "content": " 2 "},
    {"role": "user", "content": 'Sure? é 日本 "quoted"'},
]
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]
TEMPLATES = {
    "chatml": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "mistral": "{{ bos_token }}{% for m in messages if m.role != 'system' %}{% if m['role'] == 'user' "
    "%}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] | trim }}{{ eos_token }}{% endif %}{% endfor %}",
    "blocks and loop controls": """
    {%- set ns = namespace(system='', count=0) -%}
    {%- for message in messages %}
        {%- if message.role == 'system' %}
            {%- set ns.system = message.content %}
            {%- continue %}
        {%- endif %}
        {%- set ns.count = ns.count + 1 %}
        {% if ns.count > 2 %}
        {% break %}
        {% endif %}
        {{- loop.index ~ ':' ~ message.content }}
    {%- endfor %}
    {% if ns.system %}
    system {{ ns.system | upper }}
    {% endif %}
    """,
    "tools as json": "{% if tools %}{{ tools | tojson(indent=2) }}{{ tools | tojson }}{% endif %}{{ "
    "messages | tojson }}",
    "generation blocks": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content "
    "}}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "methods of strings": "{{ messages[1]['content'].split('1')[0].strip() | replace('<', '[') }}{{ "
    "messages[-1].content[:4] }}"
    "{{ 'yes' if messages[0]['role'] == 'system' and documents is none else 'no' }}{{ messages | length }}",
}


def of_transformers(template: str, messages: Any, **options: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(BUILTIN["reference"] / "tokenizer.json")), **SPECIAL
    )
    text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "closed"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(name: str, prompt: bool) -> None:
    template = TEMPLATES[name]
    ours = ChatTemplate(template, SPECIAL)
    assert ours.render(TALK, add_generation_prompt=prompt) == of_transformers(
        template, TALK, add_generation_prompt=prompt
    )
    assert ours.render(TALK, tools=TOOLS, add_generation_prompt=prompt) == of_transformers(
        template, TALK, tools=TOOLS, add_generation_prompt=prompt
    )


def test_templates_read_further_variables_and_the_date() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}{{ enable_thinking }}", {})
    assert template.render(TALK, enable_thinking=False) == of_transformers(
        template.source, TALK, enable_thinking=False
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__() }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ 1 / 0 }}",
        "{% for x in range(10000000000) %}{% endfor %}",
    ],
)
def test_what_a_template_refuses_or_must_not_do_is_a_usage_error(template: str) -> None:
    with pytest.raises(UsageError, match="chat template refuses"):
        ChatTemplate(template, {}).render(TALK)


def test_a_template_that_is_not_jinja_is_named_with_its_line() -> None:
    with pytest.raises(UnsupportedFormat, match="line 2"):
        ChatTemplate("{{ messages }}\n{% for %}", {}).render(TALK)


@pytest.mark.parametrize("messages", [[], "Hello", [{"role": "user"}], ["Hello"], [{"content": "Hello"}]])
def test_messages_have_role_and_content(messages: Any) -> None:
    with pytest.raises(UsageError, match="role and content"):
        ChatTemplate("x", {}).render(messages)


def write(path: Path, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def rendered(path: Path, name: str | None = None) -> str:
    template = load_chat_template(path, name)
    assert template is not None
    return template.render(TALK)


def test_the_template_of_a_model_and_its_special_tokens_are_found(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    eos = {"content": "<end>", "special": True}
    write(tmp_path, chat_template="{{ bos_token }}config{{ eos_token }}", bos_token="<s>", eos_token=eos)
    assert rendered(tmp_path) == "<s>config<end>"
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<pad>", "bos_token": "old"}))
    (tmp_path / "chat_template.jinja").write_text("file{{ bos_token }}{{ pad_token }}")
    assert rendered(tmp_path) == "file<s><pad>"


def test_further_templates_are_found_by_name(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "first"}, {"name": "tool_use", "template": "second"}]
    write(tmp_path, chat_template=named)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("third")
    assert [rendered(tmp_path, name) for name in (None, "tool_use", "rag")] == ["first", "second", "third"]
    with pytest.raises(UsageError, match="Did you mean 'tool_use'"):
        load_chat_template(tmp_path, "tool_uses")


def test_the_templates_that_transformers_saves_are_read(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(BUILTIN["reference"] / "tokenizer.json")), **SPECIAL
    )
    tokenizer.chat_template = {"default": TEMPLATES["mistral"], "json": TEMPLATES["tools as json"]}
    tokenizer.save_pretrained(tmp_path)
    assert rendered(tmp_path) == of_transformers(TEMPLATES["mistral"], TALK)
    assert rendered(tmp_path, "json") == of_transformers(TEMPLATES["tools as json"], TALK)


def test_files_that_are_no_json_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UnsupportedFormat, match=r"tokenizer_config\.json"):
        load_chat_template(tmp_path)


def test_a_transcript_is_paragraphs_by_role() -> None:
    assert transcript(TALK[:2]) == "System: Be brief.\n\nUser: What is <b>1 + 1</b>?"


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"])
def test_files_that_lead_elsewhere_or_are_none_are_refused(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "secret").write_text("{}")
    (model / "chat_template.jinja").write_text("a")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to("../secret")
    with pytest.raises(StorageError, match="leads out of"):
        load_chat_template(model)
    (model / name).unlink()
    make_fifo(model / name)
    with pytest.raises(StorageError, match="FIFO"):
        load_chat_template(model)
