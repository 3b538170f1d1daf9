"""`/v1/chat/completions` through OpenAI's own client."""

from typing import Any

import openai
import pytest

import compress
from tests.support.http_server import Running, running

TALK: list[Any] = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 10}


def test_a_conversation_is_answered_as_the_python_interface_does(
    chat_client: openai.OpenAI, chat_llm: compress.LLM, chat_dir: Any
) -> None:
    (expected,) = compress.load(chat_dir, device="cpu").generate(
        [TALK], compress.SamplingParams(max_tokens=10)
    )
    answer = chat_client.chat.completions.create(messages=TALK, **GREEDY)
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", expected.text)
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.num_prompt_tokens
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    assert chat_client.chat.completions.create(messages=parts, **GREEDY).choices[0].message == message  # type: ignore[arg-type]


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(chat_client: openai.OpenAI) -> None:
    whole = chat_client.chat.completions.create(messages=TALK, **GREEDY)
    chunks = list(
        chat_client.chat.completions.create(
            messages=TALK, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    *deltas, last = chunks
    assert deltas[0].choices[0].delta.role == "assistant"
    assert "".join(each.choices[0].delta.content or "" for each in deltas) == whole.choices[0].message.content
    assert deltas[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage == whole.usage


def test_logprobs_list_each_token_with_its_bytes(chat_client: openai.OpenAI) -> None:
    answer = chat_client.chat.completions.create(messages=TALK, logprobs=True, top_logprobs=2, **GREEDY)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 10
    content = b"".join(bytes(each.bytes or []) for each in logprobs.content)
    assert content.decode("utf-8", "replace") == answer.choices[0].message.content
    for each in logprobs.content:
        assert each.top_logprobs[0].logprob == pytest.approx(each.logprob, abs=1e-6)
        assert len(each.top_logprobs) == 2
    wanted = {"logprobs": True, "top_logprobs": 2, "stream": True, **GREEDY}
    chunks = list(chat_client.chat.completions.create(messages=TALK, **wanted))
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert [each.token for each in streamed] == [each.token for each in logprobs.content]


def test_max_completion_tokens_and_the_rest_of_the_context(
    chat_client: openai.OpenAI, chat_server: Running, chat_llm: compress.LLM
) -> None:
    short = chat_client.chat.completions.create(
        model="tiny", messages=TALK, max_completion_tokens=3, temperature=0
    )
    assert short.usage is not None
    assert short.usage.completion_tokens == 3
    rest = chat_client.chat.completions.create(
        model="tiny", messages=TALK, temperature=0, extra_body={"ignore_eos": True}
    )
    assert rest.usage is not None
    assert rest.usage.total_tokens == chat_llm.engine.max_model_len


def test_a_text_without_a_limit_keeps_those_of_a_request(chat_llm: compress.LLM) -> None:
    ask: dict[str, Any] = {"messages": TALK, "n": 2, "logprobs": True, "top_logprobs": 2, "ignore_eos": True}
    with running(chat_llm, "tiny", max_call_tokens=20) as server:
        answer = server.post("/v1/chat/completions", **ask)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 10
        assert {each["finish_reason"] for each in answer.json()["choices"]} == {"length"}
        assert server.post("/v1/chat/completions", **ask, max_tokens=6).status_code == 400


def test_the_template_gets_the_names_that_a_request_states(
    chat_client: openai.OpenAI,
) -> None:
    plain = chat_client.chat.completions.create(messages=TALK, **GREEDY)
    loud = chat_client.chat.completions.create(
        messages=TALK, extra_body={"chat_template_kwargs": {"shout": True}}, **GREEDY
    )
    assert plain.usage is not None
    assert loud.usage is not None
    assert loud.usage.prompt_tokens > plain.usage.prompt_tokens


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"messages": [{"role": "refuse", "content": "x"}]}, "no such role"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type"),
        ({"messages": TALK, "top_logprobs": 2}, "logprobs"),
        ({"messages": TALK, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": TALK, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": TALK, "chat_template_kwargs": {"messages": 1}}, "messages"),
        ({"messages": TALK, "chat_template_kwargs": {"eos_token": "x"}}, "eos_token"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_a_sentence(
    chat_server: Running, body: dict[str, Any], word: str
) -> None:
    response = chat_server.post("/v1/chat/completions", model="tiny", **body)
    assert response.status_code == 400
    assert word in response.json()["error"]["message"]


def test_a_model_without_a_template_answers_no_conversation(server: Running) -> None:
    response = server.post("/v1/chat/completions", messages=TALK)
    assert response.status_code == 400
    assert "chat template" in response.json()["error"]["message"]
