"""What is refused, with which status and which sentence, in the form that OpenAI's client understands."""

import contextlib
import socket
import threading
from typing import Any

import httpx
import openai
import pytest

import compress
from tests.support.http_server import Running, running, wait_until


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [8192]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "4"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1024}, "max_tokens"),
        ({"prompt": [5] * 1024, "max_tokens": 1}, "prompt"),
        ({"prompt": [5] * 2000, "max_tokens": 1}, "prompt"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": 1e9}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "top_p": 1.5}, "top_p"),
        ({"prompt": "a", "top_k": -2}, "top_k"),
        ({"prompt": "a", "min_p": 1}, "min_p"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 129}, "n"),
        ({"prompt": ["a"] * 100, "n": 2}, "n"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "stop": ["a"] * 17}, "stop"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": "x" * 129}, "stop"),
        ({"prompt": "a", "seed": 1.5}, "seed"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream": True, "stream_options": {"other": True}}, "stream_options"),
        ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty"),
        ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias"),
        ({"prompt": "a", "best_of": 4}, "best_of"),
        ({"prompt": "a", "skip_special_tokens": False}, "skip_special_tokens"),
        ({"prompt": "a", "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "max_token": 4}, "max_token"),
    ],
    ids=str,
)
def test_a_wrong_value_is_named(server: Running, body: dict[str, Any], param: str | None) -> None:
    response = server.post(**body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert (param or "prompt") in error["message"]
    assert error["message"].endswith((".", "?"))


def test_what_changes_nothing_is_let_through(server: Running) -> None:
    response = server.post(
        prompt="a",
        max_tokens=1,
        user="somebody",
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        best_of=1,
        suffix=None,
        stop=None,
        top_k=-1,
        seed=-1,
        metadata={"a": "b"},
        skip_special_tokens=True,
        prompt_logprobs=None,
        bad_words=[],
        return_token_ids=False,
    )
    assert response.status_code == 200, response.text


def test_a_least_number_of_tokens_is_let_through_where_nothing_ends_a_text_before(server: Running) -> None:
    ask: dict[str, Any] = {"prompt": "a", "max_tokens": 3, "min_tokens": 3}
    assert server.post(**ask, ignore_eos=True).json()["usage"]["completion_tokens"] == 3
    assert server.post(**ask, ignore_eos=True, stop=["b"]).status_code == 400
    assert server.post(**ask).status_code == 400


@pytest.mark.parametrize("least", [4, 1 << 40])
def test_more_tokens_at_least_than_at_most_are_refused(server: Running, least: int) -> None:
    response = server.post(prompt="a", max_tokens=3, min_tokens=least, ignore_eos=True)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "min_tokens"
    assert error["message"].startswith(f"min_tokens is {least}")
    assert error["message"].count(".") == 1


def test_the_least_is_compared_with_the_default_and_with_a_prompt_that_is_scored(server: Running) -> None:
    default = server.post(prompt="a", min_tokens=17, ignore_eos=True).json()["error"]["message"]
    assert "at most 16 tokens" in default
    scored: dict[str, Any] = {"prompt": "a", "max_tokens": 0, "echo": True, "ignore_eos": True}
    assert server.post(**scored, min_tokens=0).status_code == 200
    assert "at most 0 tokens" in server.post(**scored, min_tokens=1).json()["error"]["message"]


def test_a_typing_error_gets_a_hint(server: Running) -> None:
    assert "Did you mean 'max_tokens'?" in server.post(prompt="a", max_token=1).json()["error"]["message"]


def test_statuses_of_paths_methods_models_and_types(server: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="reference", prompt="a", max_tokens=5000)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="reference", prompt=[5] * 1020, max_tokens=50)
    assert caught.value.code == "context_length_exceeded"
    assert httpx.get(server.url + "/v2").status_code == 404
    assert httpx.get(server.url + "/v2").json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(server.url + "/v1/completions").status_code == 405
    assert httpx.get(server.url + "/v1/models/other").status_code == 404
    assert httpx.post(server.url + "/v1/completions", content=b'{"prompt": "a"}').status_code == 415
    broken = httpx.post(
        server.url + "/v1/completions", content=b"{", headers={"content-type": "application/json"}
    )
    assert broken.status_code == 400
    assert broken.json()["error"]["code"] == "invalid_json"


def test_only_a_known_key_is_served(llm: compress.LLM) -> None:
    with running(llm, "reference", api_keys=("first-key", "second-key")) as server:
        for key in (None, "first", "first-key", "FIRST-KEY", "\u00e4"):
            headers = {} if key is None else {"authorization": f"Bearer {key}".encode()}
            response = httpx.get(server.url + "/v1/models", headers=headers)
            assert response.status_code == (200 if key == "first-key" else 401), key
        wrong = httpx.post(server.url + "/v1/completions", json={"prompt": "a"})
        assert wrong.status_code == 401
        assert wrong.json()["error"]["code"] == "invalid_api_key"
        with openai.OpenAI(base_url=server.url + "/v1", api_key="second-key") as client:
            client.completions.create(model="reference", prompt="a", max_tokens=1)
        wait_until(lambda: [each["client"] for each in server.records[-1:]] == ["key-2"])
        assert "second-key" not in str(server.records)
        for open_path in ("/health", "/metrics", "/", "/version"):
            assert httpx.get(server.url + open_path).status_code == 200


def test_a_body_that_is_too_long_is_refused_whether_it_states_its_length_or_not(llm: compress.LLM) -> None:
    with running(llm, "reference", max_body_bytes=2000) as server:
        stated = server.post(prompt="a" * 2000)
        assert stated.status_code == 413
        assert stated.json()["error"]["code"] == "body_too_large"
        chunked = httpx.post(
            server.url + "/v1/completions",
            content=(b"a" * 500 for _ in range(10)),
            headers={"content-type": "application/json"},
        )
        assert chunked.status_code == 413
        assert server.post(prompt="a", max_tokens=1).status_code == 200
        assert server.service.held.total == 0


def test_slow_bodies_and_slow_headers_are_cut_off(llm: compress.LLM) -> None:
    with running(llm, "reference", body_timeout_s=0.3) as server:
        port = int(server.url.rpartition(":")[2])
        head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", port)) as slow_body:
            slow_body.sendall(head + b"content-length: 100\r\n\r\n{")
            assert slow_body.recv(1000).startswith(b"HTTP/1.1 408")
        with socket.create_connection(("127.0.0.1", port)) as slow_head:
            slow_head.sendall(head)
            slow_head.settimeout(10)
            assert slow_head.recv(1000) == b""
        assert server.service.held.total == 0


def test_a_peer_gets_its_share_of_connections_only(llm: compress.LLM) -> None:
    with running(llm, "reference", max_connections=8) as server:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        held = [socket.create_connection(address) for _ in range(4)]
        with socket.create_connection(address) as refused:
            refused.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert refused.recv(10) == b""
        for each in held:
            each.close()
        wait_until(lambda: _answers(server))


def _answers(server: Running) -> bool:
    try:
        return httpx.get(server.url + "/health").status_code == 200
    except httpx.HTTPError:
        return False


def test_a_full_queue_is_429_and_says_when_to_come_again(llm: compress.LLM) -> None:
    body = {"prompt": "a", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with running(llm, "reference", max_queued=4, max_choices=8) as server:
        statuses: list[int] = []
        headers: list[httpx.Headers] = []

        def send() -> None:
            response = server.post(**body)
            statuses.append(response.status_code)
            headers.append(response.headers)

        threads = [threading.Thread(target=send) for _ in range(10)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert set(statuses) == {200, 429}
        assert all(h["retry-after"] == "1" for h, s in zip(headers, statuses, strict=True) if s == 429)
        too_many = server.post(prompt=["a"] * 8, max_tokens=1)
        assert too_many.status_code == 429
        assert too_many.json()["error"]["type"] == "rate_limit_error"
        assert server.post(prompt="a", max_tokens=1).status_code == 200


@pytest.mark.slow
def test_an_answer_that_would_be_too_large_is_refused(llm: compress.LLM) -> None:
    with running(llm, "reference", max_call_tokens=100, max_scored_bytes=4 * 8192 * 10) as server:
        assert server.post(prompt="a", max_tokens=50, n=2).status_code == 200
        assert "more than the 100" in server.post(prompt="a", max_tokens=51, n=2).json()["error"]["message"]
        assert server.post(prompt="a", max_tokens=50, logprobs=20).status_code == 400
        assert server.post(prompt=[5] * 11, max_tokens=0, echo=True, logprobs=0).status_code == 400
        assert server.post(prompt=[5] * 10, max_tokens=0, echo=True, logprobs=0).status_code == 200
