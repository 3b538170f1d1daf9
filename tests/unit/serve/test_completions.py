"""`/v1/completions` through OpenAI's own client: the texts, log probabilities and streams of the engine."""

import json
import math

import httpx
import openai
import pytest

import compress
from tests.support.http_server import WAIT_S, Running, wait_until

PROMPTS = ["def add(a, b):", "import ", "class Node:"]
GREEDY = {"model": "reference", "temperature": 0, "max_tokens": 12}


def test_greedy_texts_are_those_of_the_python_interface(client: openai.OpenAI, llm: compress.LLM) -> None:
    answer = client.completions.create(prompt=PROMPTS, **GREEDY)
    expected = [
        compress.load("builtin://reference", device="cpu").generate(
            prompt, compress.SamplingParams(max_tokens=12)
        )[0]
        for prompt in PROMPTS
    ]
    assert [each.text for each in answer.choices] == [each.text for each in expected]
    assert [each.index for each in answer.choices] == [0, 1, 2]
    assert [each.finish_reason for each in answer.choices] == [each.finish_reason for each in expected]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(each.num_prompt_tokens for each in expected)
    assert answer.usage.completion_tokens == sum(len(each.token_ids) for each in expected)


def test_a_stream_has_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPTS[0], **GREEDY)
    chunks = list(
        client.completions.create(
            prompt=PROMPTS[0], stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    *texts, last = chunks
    assert "".join(each.choices[0].text for each in texts) == whole.choices[0].text
    assert [each.choices[0].finish_reason for each in texts][-1] == whole.choices[0].finish_reason
    assert [each.choices[0].finish_reason for each in texts[:-1]] == [None] * (len(texts) - 1)
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert len({each.id for each in chunks}) == 1
    assert len(texts) > 3


def test_every_event_of_a_stream_is_one_line_whatever_ends_lines_for_the_client(server: Running) -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x1cf\r\ng"
    ask = {"prompt": text, "max_tokens": 1, "echo": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=ask, timeout=WAIT_S) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    assert json.loads(lines[0])["choices"][0]["text"] == text


def test_prompts_may_be_token_ids(client: openai.OpenAI, llm: compress.LLM) -> None:
    ids = [llm.encode(each) for each in PROMPTS[:2]]
    by_text = client.completions.create(prompt=PROMPTS[:2], **GREEDY)
    assert [e.text for e in client.completions.create(prompt=ids, **GREEDY).choices] == [
        e.text for e in by_text.choices
    ]
    assert client.completions.create(prompt=ids[0], **GREEDY).choices[0].text == by_text.choices[0].text


def test_echo_scores_the_prompt_as_the_python_interface_does(
    client: openai.OpenAI, llm: compress.LLM
) -> None:
    text = "def add(a, b):\n    return a + b  # \u00e4\u20ac"
    (expected,) = compress.load("builtin://reference", device="cpu").score(text)
    answer = client.completions.create(
        model="reference", prompt=[text], max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    (choice,) = answer.choices
    assert choice.text == text
    assert choice.finish_reason == "length"
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx(list(expected.logprobs), abs=1e-5)
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.top_logprobs is not None
    for idx, (token, offset) in enumerate(zip(logprobs.tokens, logprobs.text_offset, strict=True)):
        if not token.startswith("bytes:"):
            assert text[offset : offset + len(token)] == token
        if idx:
            top = logprobs.top_logprobs[idx]
            assert token in top
            assert max(top.values()) >= logprobs.token_logprobs[idx]


def test_echo_with_a_continuation_has_both(client: openai.OpenAI) -> None:
    plain = client.completions.create(prompt=PROMPTS[0], logprobs=2, **GREEDY).choices[0]
    both = client.completions.create(prompt=PROMPTS[0], logprobs=2, echo=True, **GREEDY).choices[0]
    assert both.text == PROMPTS[0] + plain.text
    assert plain.logprobs is not None
    assert both.logprobs is not None
    num = len(plain.logprobs.tokens or [])
    assert num == 12
    assert (both.logprobs.tokens or [])[-num:] == plain.logprobs.tokens
    assert (both.logprobs.token_logprobs or [])[-num:] == pytest.approx(
        plain.logprobs.token_logprobs, abs=1e-4
    )
    assert (both.logprobs.text_offset or [])[-num:] == [
        each + len(PROMPTS[0]) for each in plain.logprobs.text_offset or []
    ]
    streamed = list(
        client.completions.create(prompt=PROMPTS[0], logprobs=2, echo=True, stream=True, **GREEDY)
    )
    assert "".join(each.choices[0].text for each in streamed) == both.text
    offsets = [o for c in streamed if c.choices[0].logprobs for o in c.choices[0].logprobs.text_offset or []]
    assert offsets == both.logprobs.text_offset


def test_echo_alone_repeats_the_prompt(server: Running) -> None:
    answer = server.post(prompt="abc", max_tokens=0, echo=True).json()
    assert answer["choices"][0] == {"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length"}
    assert answer["usage"]["completion_tokens"] == 0


def test_greedy_tokens_are_the_likeliest_ones(client: openai.OpenAI) -> None:
    choice = client.completions.create(prompt=PROMPTS[0], logprobs=3, **GREEDY).choices[0]
    assert choice.logprobs is not None
    for token, value, top in zip(
        choice.logprobs.tokens or [],
        choice.logprobs.token_logprobs or [],
        choice.logprobs.top_logprobs or [],
        strict=True,
    ):
        assert math.isclose(max(top.values()), value)
        assert top[token] == value
        assert len(top) == 3


def test_n_texts_of_one_prompt_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    ask = {"model": "reference", "prompt": PROMPTS, "n": 2, "max_tokens": 10, "temperature": 1.0}
    first = client.completions.create(seed=7, **ask)  # type: ignore[call-overload]
    again = client.completions.create(seed=7, **ask)  # type: ignore[call-overload]
    assert [each.text for each in first.choices] == [each.text for each in again.choices]
    assert [each.index for each in first.choices] == list(range(6))
    assert len({each.text for each in first.choices}) == 6
    other = client.completions.create(**ask)  # type: ignore[call-overload]
    assert [each.text for each in other.choices] != [each.text for each in first.choices]
    assert first.usage.prompt_tokens == other.usage.prompt_tokens


def test_a_stop_string_ends_a_text_before_it(client: openai.OpenAI, server: Running) -> None:
    whole = client.completions.create(prompt=PROMPTS[0], **GREEDY).choices[0].text
    stop = whole[10:13]
    for stream in (False, True):
        answer = client.completions.create(
            prompt=PROMPTS[0], stop=[stop, "never"], logprobs=0, stream=stream, **GREEDY
        )
        chunks = [answer] if not stream else list(answer)  # type: ignore[call-overload]
        text = "".join(each.choices[0].text for each in chunks)
        assert text == whole[: whole.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"
    wait_until(server.is_idle)


def test_ignore_eos_goes_on(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="reference", prompt=[0], max_tokens=64, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 64


def test_a_prompt_seen_before_comes_from_the_prefix_cache(server: Running, llm: compress.LLM) -> None:
    prompt = list(range(100, 180))
    server.post(prompt=prompt, max_tokens=2, temperature=0)
    response = server.post(prompt=prompt, max_tokens=2, temperature=0)
    usage = response.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 64
    assert server.record_of(response)["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]


def test_every_answer_names_its_request(server: Running) -> None:
    response = server.post(prompt="a", max_tokens=1)
    assert response.headers["x-request-id"] == response.json()["id"]
    assert server.record_of(response)["completion_tokens"] == 1


def test_the_other_paths_answer(server: Running, client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "reference"
    assert client.models.retrieve("reference").id == "reference"
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    assert httpx.get(server.url + "/version").json() == {"version": compress.__version__}
    page = httpx.get(server.url + "/")
    assert page.headers["content-type"].startswith("text/html")
