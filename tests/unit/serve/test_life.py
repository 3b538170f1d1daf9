"""Clients that leave, servers that stop, engines that fail, floods, and metrics that add up."""

import asyncio
import json
import socket
import threading
import time
from typing import Any

import httpx
import openai
import pytest

import compress
from compress.errors import EnvironmentUnfit
from compress.serve.call import Call
from compress.serve.connection import Connection
from compress.serve.server import Server, listen
from compress.serve.settings import ServerSettings
from tests.support.http_server import Running, running, wait_until

LONG: dict[str, Any] = {"prompt": "def f", "max_tokens": 900, "temperature": 0, "ignore_eos": True}


def open_stream(server: Running, num_events: int, headers: dict[str, str] | None = None, **body: Any) -> None:
    """Read some events of a stream, and leave."""
    with httpx.stream(
        "POST", server.url + "/v1/completions", json={**LONG, "stream": True, **body}, headers=headers
    ) as response:
        assert response.status_code == 200
        for idx, line in enumerate(response.iter_lines()):
            if line and idx >= num_events:
                return


def test_a_client_that_leaves_a_stream_frees_its_blocks(server: Running) -> None:
    before = server.samples()
    open_stream(server, 4)
    wait_until(server.is_idle, 10)
    wait_until(lambda: any(each.get("disconnected") for each in server.records[-1:]))
    record = server.records[-1]
    assert record["reason"] == "abort"
    assert 0 < record["completion_tokens"] < 900
    after = server.samples()
    assert after["vllm:request_success_total:abort"] == before["vllm:request_success_total:abort"] + 1
    assert after["compress:client_disconnects_total"] == before["compress:client_disconnects_total"] + 1


def test_a_client_that_leaves_before_the_first_token_frees_its_place(server: Running) -> None:
    with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=0.05) as client:
        client.post(server.url + "/v1/completions", json={**LONG, "n": 8, "prompt": [7] * 100})
    wait_until(server.is_idle, 10)


def test_a_text_that_ends_while_its_chunks_are_made_is_sent_whole(
    server: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Call.chunks

    def slowly(self: Call) -> list[dict[str, Any]]:
        chunks = make(self)
        wait_until(lambda: self.done)
        return chunks

    monkeypatch.setattr(Call, "chunks", slowly)  # those of an echo are made beside the event loop
    ask: dict[str, Any] = {
        "model": "reference",
        "prompt": "def f",
        "max_tokens": 60,
        "echo": True,
        "temperature": 0,
    }
    chunks = list(client.completions.create(**ask, stream=True, extra_body={"ignore_eos": True}))
    assert [each.choices[0].finish_reason for each in chunks][-1] == "length"
    monkeypatch.undo()
    whole = client.completions.create(**ask, extra_body={"ignore_eos": True})
    assert "".join(each.choices[0].text for each in chunks) == whole.choices[0].text


def test_a_client_that_does_not_read_is_cut_off_and_stalls_nobody(llm: compress.LLM) -> None:
    with running(llm, "reference", send_buffer=4096, write_timeout_s=0.3) as server:
        body = json.dumps({**LONG, "stream": True, "logprobs": 20}).encode()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n" % len(body) + body
            )
            started = time.monotonic()
            assert server.post(prompt="a", max_tokens=2).status_code == 200
            assert time.monotonic() - started < 30
            wait_until(lambda: any(each["disconnected"] for each in server.records))
            (record,) = [each for each in server.records if each["disconnected"]]
            assert record["completion_tokens"] < 900
            wait_until(server.is_idle)


def test_a_client_that_reads_slowly_gets_the_whole_answer(
    llm: compress.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Impatient(Connection):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.timeout_keep_alive = 0.2  # type: ignore[assignment]

    monkeypatch.setattr("compress.serve.connection.Connection", Impatient)
    ask = {"prompt": [list(range(1, 250))] * 2, "max_tokens": 0, "echo": True, "logprobs": 20}
    with running(llm, "reference", send_buffer=4096, write_timeout_s=0.4) as server:
        body = json.dumps(ask).encode()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.settimeout(30)
            slow.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n" % len(body) + body
            )
            answer = b""
            started = time.monotonic()
            while part := slow.recv(4096):  # the server ends the connection, once all of it was read
                if not answer:
                    started = time.monotonic()
                answer += part
                time.sleep(0.03)
            seconds = time.monotonic() - started
        head, _, content = answer.partition(b"\r\n\r\n")
        assert f"content-length: {len(content)}".encode() in head
        assert len(json.loads(content)["choices"]) == 2
        assert seconds > 0.8


def test_metrics_add_up_with_what_was_asked(llm: compress.LLM) -> None:
    with running(llm, "reference") as server:
        usages = []
        for body in (
            {"prompt": ["a b c", "d"], "max_tokens": 5},
            {"prompt": "x", "max_tokens": 7, "n": 2, "temperature": 1},
            {"prompt": "def f(", "max_tokens": 30, "stop": ["e"]},
            {"prompt": "abc def", "max_tokens": 0, "echo": True, "logprobs": 1},
        ):
            usages.append(server.post(**{"temperature": 0, "ignore_eos": True, **body}).json()["usage"])
        refused = server.post(prompt="a", max_tokens=-1)
        assert refused.status_code == 400
        wait_until(lambda: len(server.records) == 5 and server.is_idle())
        values = server.samples()
        assert values["vllm:generation_tokens_total"] == sum(each["completion_tokens"] for each in usages)
        prompts = sum(each["prompt_tokens"] for each in usages)
        assert values["vllm:prompt_tokens_total"] == prompts + usages[1]["prompt_tokens"]  # n = 2
        num = {reason: values[f"vllm:request_success_total:{reason}"] for reason in ("stop", "length")}
        assert sum(num.values()) == 6
        assert values["vllm:time_to_first_token_seconds_count"] == 5
        assert values["vllm:request_generation_tokens_sum"] == values["vllm:generation_tokens_total"]
        assert values["vllm:e2e_request_latency_seconds_count"] == 5
        assert values["vllm:request_queue_time_seconds_count"] == 5
        assert values["vllm:inter_token_latency_seconds_count"] >= values["vllm:generation_tokens_total"] - 5
        assert values["http_requests_total"] == 5  # the page of metrics counts itself after it was made
        assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0
        assert values["vllm:kv_cache_usage_perc"] == 0
        records = [each for each in server.records if each["status"] == 200]
        assert [each["completion_tokens"] for each in records] == [e["completion_tokens"] for e in usages]
        assert all(each["ttft_ms"] > 0 and each["batch_size"] >= 1 for each in records[:3])
        assert all(json.loads(json.dumps(each)) == each for each in server.records)


@pytest.mark.slow
def test_a_flood_of_one_client_does_not_starve_another(llm: compress.LLM) -> None:
    with running(llm, "reference", api_keys=("flood", "quiet")) as server:
        stop = threading.Event()

        def flood() -> None:
            while not stop.is_set():
                httpx.post(
                    server.url + "/v1/completions",
                    json={"prompt": "a", "max_tokens": 15, "ignore_eos": True},
                    headers={"authorization": "Bearer flood"},
                    timeout=120,
                )

        threads = [threading.Thread(target=flood) for _ in range(16)]
        for each in threads:
            each.start()
        try:
            wait_until(lambda: server.service.thread.num_queued >= 10)
            with openai.OpenAI(base_url=server.url + "/v1", api_key="quiet", max_retries=0) as client:
                for _ in range(3):
                    before = _served(server, "key-1")
                    client.completions.create(model="reference", prompt="b", max_tokens=2)
                    # it waits for the first row that is free, not for the 10 requests that came before it
                    assert _served(server, "key-1") - before <= 8
        finally:
            stop.set()
            for each in threads:
                each.join()


def _served(server: Running, client: str) -> int:
    return sum(each["client"] == client for each in list(server.records))


def test_stopping_lets_running_requests_finish_and_refuses_the_rest(llm: compress.LLM) -> None:
    with running(llm, "reference", grace_s=60) as server:
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda: answers.append(server.post(**{**LONG, "max_tokens": 60})))
            for _ in range(6)
        ]
        for each in threads:
            each.start()
        wait_until(lambda: server.service.thread.num_running == 4 and server.service.thread.num_queued == 2)
        kept = httpx.Client()
        kept.get(server.url + "/health")
        server.stop()
        wait_until(lambda: server.service.draining)
        health = kept.get(server.url + "/health")
        assert health.status_code == 503
        assert health.headers["retry-after"]
        late = kept.post(server.url + "/v1/completions", json={"prompt": "a"})
        assert late.status_code == 503
        for each in threads:
            each.join()
        kept.close()
        assert sorted(each.status_code for each in answers) == [200] * 4 + [503] * 2
        full = [each.json()["usage"]["completion_tokens"] for each in answers if each.status_code == 200]
        assert full == [60] * 4
        wait_until(lambda: server.finished is not None)
        assert server.finished


def test_a_client_in_the_middle_of_its_body_is_refused_when_the_server_stops(llm: compress.LLM) -> None:
    with running(llm, "reference") as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            head = "Host: here\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
            client.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}{{".encode())
            wait_until(lambda: server.service._in_flight.total == 1)
            server.stop()
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        wait_until(lambda: server.finished is not None)
        assert server.finished
        assert server.service.held.total == 0


def test_the_grace_time_ends(llm: compress.LLM) -> None:
    with running(llm, "reference", grace_s=0.1) as server:
        answers: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: answers.append(server.post(**LONG).json()))
        thread.start()
        wait_until(lambda: server.service.thread.num_running == 1)
        server.stop()
        thread.join()
        wait_until(lambda: server.finished is not None)
        assert not server.finished
        assert answers[0]["choices"][0]["finish_reason"] == "abort"
        assert not llm.engine.has_work


def test_a_failing_engine_ends_the_server(llm: compress.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(llm, "reference") as server:
        with monkeypatch.context() as patch:

            def fail() -> Any:
                raise RuntimeError("the device fell off")

            patch.setattr(llm.engine, "step", fail)
            answer = server.post(**LONG)
            assert answer.status_code == 500
            assert "fell off" not in answer.text
            wait_until(lambda: server.error is not None)
            assert "the device fell off" in str(server.error)
        for request_id in list(llm.engine._unfinished):
            llm.engine.cancel(request_id)


def test_an_address_that_another_program_took_meanwhile_is_named(llm: compress.LLM) -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with listen("127.0.0.1", port) as other:  # both may bind as long as neither listens
            other.listen()
            server = Server(llm, ServerSettings("m"), listener, lambda record: None)
            ready: list[str] = []
            with pytest.raises(EnvironmentUnfit, match=f"cannot listen on 127.0.0.1, port {port}: Address"):
                asyncio.run(server.serve(lambda: ready.append(server.url)))
            assert not ready


def test_requests_that_wait_end_at_their_deadline_too(
    llm: compress.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    step = llm.engine.step

    def held_up() -> Any:
        gate.wait(60)
        return step()

    monkeypatch.setattr(llm.engine, "step", held_up)
    with running(llm, "reference", request_timeout_s=0.3) as server:
        first = threading.Thread(target=server.post, kwargs=LONG)
        first.start()
        wait_until(lambda: server.service.thread.num_running == 1)
        try:
            for ask in ({}, {"n": 2}, {"echo": True, "logprobs": 0}, {"stream": True}):
                answer = httpx.post(server.url + "/v1/completions", json={**LONG, **ask}, timeout=20)
                assert answer.status_code == 200
                assert answer.text.count('"finish_reason":"abort"') == (2 if "n" in ask else 1)
            scored = {"prompt": "a b", "max_tokens": 0, "echo": True, "logprobs": 1}
            choice = server.post(**scored).json()["choices"][0]
            assert choice["finish_reason"] == "abort"
            assert choice["logprobs"]["token_logprobs"] == [None, None]
            assert server.service.thread.num_queued == 0
        finally:
            gate.set()
            first.join()


def test_a_request_ends_at_its_deadline_with_what_it_has(llm: compress.LLM) -> None:
    with running(llm, "reference", request_timeout_s=0.5) as server:
        answer = server.post(**LONG).json()
        assert answer["choices"][0]["finish_reason"] == "abort"
        assert 0 < answer["usage"]["completion_tokens"] < 900
