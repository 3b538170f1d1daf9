"""A thousand requests of clients that come, go and leave early: memory stays flat and metrics add up."""

import random
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.http_server import wait_until
from tests.support.served_process import ServedProcess, served

NUM_REQUESTS = 1000
NUM_CLIENTS = 12
NUM_PARTS = 5
MAX_GROWTH_BYTES = 8 << 20
"""From the second part on; a leak of what one request holds, some 20 KB, would be twice that."""


def work(server: ServedProcess, rng: random.Random, usages: list[dict[str, Any]]) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(NUM_REQUESTS // NUM_PARTS // NUM_CLIENTS + 1):
            body: dict[str, Any] = {
                "prompt": [rng.randrange(1, 300) for _ in range(rng.randrange(1, 60))],
                "max_tokens": rng.randrange(1, 24),
                "temperature": rng.choice([0, 1]),
                "n": rng.choice([1, 1, 1, 2]),
                "ignore_eos": True,
                "echo": rng.random() < 0.1,
            }
            if rng.random() < 0.2:
                body["stop"] = ["e", "a"]
            if rng.random() < 0.2:
                body["logprobs"] = 2
            if rng.random() < 0.3:
                leave(client, body, rng)
            else:
                response = client.post("/v1/completions", json=body)
                assert response.status_code == 200, response.text
                usages.append(response.json()["usage"])


def leave(client: httpx.Client, body: dict[str, Any], rng: random.Random) -> None:
    """Send a request, and leave after a while or some events."""
    try:
        if rng.random() < 0.5:
            client.post("/v1/completions", json=body, timeout=rng.random() * 0.1 + 0.001)
            return
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            for _, _line in zip(range(rng.randrange(0, 10)), response.iter_lines(), strict=False):
                pass
    except httpx.TimeoutException:
        pass


def samples(server: ServedProcess) -> dict[str, float]:
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(server.url + "/metrics").text):
        for sample in family.samples:
            name = f"{sample.name}:{sample.labels.get('finished_reason', '')}"
            values[name] = values.get(name, 0.0) + sample.value
    return values


def is_idle(server: ServedProcess) -> bool:
    values = samples(server)
    names = ("vllm:num_requests_running:", "vllm:num_requests_waiting:", "vllm:kv_cache_usage_perc:")
    return not any(values[name] for name in names)


@pytest.mark.slow
def test_a_thousand_requests_leave_nothing_behind(chat_dir: Path, tmp_path: Path) -> None:
    with served(chat_dir, tmp_path / "log", "--max-batch-size", 4) as server:
        usages: list[dict[str, Any]] = []
        errors: list[Exception] = []
        sizes = []

        def run(seed: int) -> None:
            try:
                work(server, random.Random(seed), usages)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                errors.append(error)

        for part in range(NUM_PARTS):
            threads = [threading.Thread(target=run, args=(100 * part + idx,)) for idx in range(NUM_CLIENTS)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
            assert errors == []
            wait_until(lambda: is_idle(server))
            sizes.append(server.resident_bytes())
        assert sizes[-1] - sizes[1] < MAX_GROWTH_BYTES, sizes
        values = samples(server)
        records = [each for each in server.records() if "choices" in each]
        reasons = ("stop", "length", "abort", "error")
        ended = {each: values[f"vllm:request_success_total:{each}"] for each in reasons}
        assert sum(ended.values()) == sum(each["choices"] for each in records)
        assert ended["error"] == 0
        assert min(ended["stop"], ended["length"], ended["abort"]) > 0
        assert values["vllm:generation_tokens_total:"] == sum(each["completion_tokens"] for each in records)
        answered = [each for each in records if each["status"] == 200 and not each["stream"]]
        assert len(answered) >= len(usages)
        left = sum(bool(each.get("disconnected")) for each in server.records())
        assert values["compress:client_disconnects_total:"] == left > 0
        assert server.end() == 143
