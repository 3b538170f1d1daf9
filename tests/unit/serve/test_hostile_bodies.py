"""Nothing that a client sends ends the server, gets an internal error, or leaves anything held."""

import json
import random
import socket
from typing import Any

import httpx
import pytest

import compress
from tests.support.http_server import Running, running, wait_until

GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 3}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 2, "stream": True, "logprobs": 2, "n": 2}),
    ("/v1/completions", {"prompt": "a b", "max_tokens": 0, "echo": True, "logprobs": 3, "stop": ["x", "y"]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "seed": 1}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "system", "content": [{"type": "text", "text": "x"}]}],
            "max_tokens": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"shout": True},
        },
    ),
]
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    1.5,
    10**18,
    10**400,
    1e308,
    1e-320,
    "",
    "a" * 5000,
    "\u0000\ud7ff\U0010ffff\u202e",
    [],
    {},
    [[]],
    [None],
    [["a"], 1],
    {"a": {"b": []}},
    [{"role": "user"}],
    [{"role": None, "content": None}],
    [{"role": "user", "content": "x", "tool_calls": [[[]]]}] * 3,
    ["a"] * 300,
    [0] * 3000,
]
RAW = [
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"\xff\xfe",
    b'{"prompt": "a", "prompt": "b"}',
    b'{"prompt": NaN}',
    b'{"prompt": "\\ud800"}',
    b"[" * 100_000,
    b'{"prompt": ' * 70 + b"1" + b"}" * 70,
    b'{"max_tokens": ' + b"9" * 5000 + b"}",
    b'{"prompt": "a", "max_tokens": 1e400}',
    json.dumps({"prompt": "a" * 200_000}).encode(),
    json.dumps({"messages": [{"role": "user", "content": ""}] * 5000, "max_tokens": 1}).encode(),
    json.dumps({"prompt": "a", "max_tokens": 2, "stop": ["a" * 128] * 16}).encode(),
    json.dumps({"prompt": "a", "max_tokens": 2, "temperature": 1e-300, "top_p": 1e-300}).encode(),
    json.dumps({"prompt": "a", "max_tokens": 2, "temperature": 100, "top_k": 2**31 - 1}).encode(),
]


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """A good body with fields replaced, added or gone, or with bytes changed."""
    path, body = rng.choice(GOOD)
    body = json.loads(json.dumps(body))
    names = sorted({name for _, each in GOOD for name in each} | {"top_p", "min_p", "top_k", "model", "odd"})
    for _ in range(rng.randrange(1, 4)):
        name = rng.choice(names)
        if rng.random() < 0.2:
            body.pop(name, None)
        else:
            body[name] = rng.choice(ODD)
    data = bytearray(json.dumps(body).encode())
    if rng.random() < 0.2:
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return path, bytes(data)


def send(client: httpx.Client, server: Running, path: str, data: bytes) -> httpx.Response:
    return client.post(server.url + path, content=data, headers={"content-type": "application/json"})


def check(response: httpx.Response, data: bytes) -> None:
    where = f"{response.status_code} {data[:300]!r} {response.text[:300]}"
    assert response.status_code in (200, 400, 404, 413, 429), where
    if response.status_code != 200:
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}, where
        assert 5 < len(error["message"]) < 1000, where
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n"), where
        assert '"error"' not in response.text, where
    else:
        assert response.json()["choices"], where


def check_nothing_is_left(server: Running) -> None:
    service = server.service
    wait_until(lambda: server.is_idle() and service._in_flight.total == 0)
    assert service.held.total == 0
    assert not service._turns
    assert not service.thread._running
    assert not service.thread._queue._running
    assert not service.llm.engine._unfinished
    assert httpx.get(server.url + "/health").status_code == 200


def fuzz(server: Running, *, num: int, seed: int) -> None:
    rng = random.Random(seed)
    with httpx.Client(timeout=60) as client:
        for _ in range(num):
            path, data = mutated(rng)
            check(send(client, server, path, data), data)


def test_odd_bodies_get_an_answer(chat_llm: compress.LLM) -> None:
    with running(chat_llm, "tiny", max_body_bytes=300_000, request_timeout_s=2) as server:
        with httpx.Client(timeout=60) as client:
            for data in RAW:
                for path in ("/v1/completions", "/v1/chat/completions"):
                    check(send(client, server, path, data), data)
        fuzz(server, num=150, seed=1)
        check_nothing_is_left(server)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_many_odd_bodies_get_an_answer(chat_llm: compress.LLM, seed: int) -> None:
    with running(chat_llm, "tiny", max_body_bytes=300_000, request_timeout_s=2) as server:
        fuzz(server, num=2000, seed=seed)
        check_nothing_is_left(server)


def test_endless_headers_are_cut_off(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as peer:
        peer.settimeout(10)
        peer.sendall(b"GET /health HTTP/1.1\r\n")
        with pytest.raises(ConnectionError):
            send_headers(peer)


def send_headers(peer: socket.socket) -> None:
    for idx in range(10_000):
        peer.sendall(b"x%d: %s\r\n" % (idx, b"a" * 1000))


@pytest.mark.parametrize(
    "data",
    [
        b"\x00" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999999999999\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /%00%ff%2e%2e/ HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n" * 50,
        b"GET /health HTTP/1.1\r\nx: " + b"a" * 1_000_000 + b"\r\n\r\n",
    ],
    ids=range(9),
)
def test_what_is_no_http_ends_only_its_connection(server: Running, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as peer:
        peer.settimeout(10)
        try:
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(65536):
                pass
        except OSError:
            pass
    check_nothing_is_left(server)
