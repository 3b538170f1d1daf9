"""A thousand requests of clients that come, go and leave early: memory stays flat and metrics add up."""

import json
import random
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

import compress
from tests.support.http_server import Running, running, wait_until

NUM_REQUESTS = 1000
NUM_CLIENTS = 12


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def work(server: Running, rng: random.Random, num: int, usages: list[dict[str, Any]]) -> None:
    for _ in range(num):
        body: dict[str, Any] = {
            "prompt": [rng.randrange(1, 300) for _ in range(rng.randrange(1, 60))],
            "max_tokens": rng.randrange(1, 24),
            "temperature": rng.choice([0, 1]),
            "n": rng.choice([1, 1, 1, 2]),
            "ignore_eos": True,
        }
        if rng.random() < 0.2:
            body["stop"] = ["e", "a"]
        if rng.random() < 0.2:
            body["logprobs"] = 2
        if rng.random() < 0.1:
            body["echo"] = True
        if rng.random() < 0.3:
            leave(server, body, rng)
        else:
            response = server.post(**body)
            assert response.status_code == 200, response.text
            usages.append(response.json()["usage"])


def leave(server: Running, body: dict[str, Any], rng: random.Random) -> None:
    """Send a request, and leave after a while or some events."""
    try:
        if rng.random() < 0.5:
            httpx.post(server.url + "/v1/completions", json=body, timeout=rng.random() * 0.1 + 0.001)
            return
        with httpx.stream("POST", server.url + "/v1/completions", json={**body, "stream": True}) as response:
            for _, _line in zip(range(rng.randrange(0, 10)), response.iter_lines(), strict=False):
                pass
    except httpx.TimeoutException:
        pass


@pytest.mark.slow
def test_a_thousand_requests_leave_nothing_behind(chat_llm: compress.LLM) -> None:
    with running(chat_llm, "tiny") as server:
        usages: list[dict[str, Any]] = []
        sizes = []
        for part in range(4):
            errors: list[BaseException] = []

            def run(seed: int, errors: list[BaseException] = errors) -> None:
                try:
                    work(server, random.Random(seed), NUM_REQUESTS // 4 // NUM_CLIENTS + 1, usages)
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=run, args=(100 * part + idx,)) for idx in range(NUM_CLIENTS)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
            assert errors == []
            wait_until(server.is_idle)
            sizes.append(resident_bytes())
        values = server.samples()
        ended = {each: values[f"vllm:request_success_total:{each}"] for each in ("stop", "length", "abort")}
        served = [each for each in server.records if "choices" in each]
        assert sum(ended.values()) == sum(each["choices"] for each in served)
        assert values["vllm:request_success_total:error"] == 0
        assert values["vllm:generation_tokens_total"] == sum(each["completion_tokens"] for each in served)
        whole = [each for each in served if each["status"] == 200 and not each["stream"]]
        assert sum(each["completion_tokens"] for each in usages) <= sum(e["completion_tokens"] for e in whole)
        assert values["compress:client_disconnects_total"] == sum(
            bool(each["disconnected"]) for each in server.records
        )
        assert ended["abort"] > 0
        assert len(json.dumps(server.records)) > 0
        assert sizes[-1] - sizes[1] < 16 << 20, sizes
        server.records.clear()
