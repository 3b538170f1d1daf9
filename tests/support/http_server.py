"""A server in this process: an event loop in a thread of its own, on a free port of the loopback address."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from compress.llm import LLM
from compress.serve.server import Server, listen
from compress.serve.service import Service
from compress.serve.settings import ServerSettings

WAIT_S = 60.0


class Running:
    """A server that runs: its URL, its service, and the records that it has logged."""

    def __init__(self, server: Server, records: list[Mapping[str, Any]]) -> None:
        self._server = server
        self.records = records
        self.url = server.url
        self.finished: bool | None = None
        self.error: BaseException | None = None

    @property
    def service(self) -> Service:
        assert self._server.service is not None
        return self._server.service

    def stop(self) -> None:
        self._server.stop()

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=WAIT_S)

    def record_of(self, response: httpx.Response) -> Mapping[str, Any]:
        """The record of an answered request, which is logged after its answer was sent."""
        request_id = response.headers["x-request-id"]
        wait_until(lambda: any(each.get("id") == request_id for each in list(self.records)))
        return next(each for each in self.records if each.get("id") == request_id)

    def samples(self) -> dict[str, float]:
        """The values of all metrics, summed over labels other than `finished_reason`."""
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(httpx.get(self.url + "/metrics").text):
            for sample in family.samples:
                reason = sample.labels.get("finished_reason")
                name = sample.name if reason is None else f"{sample.name}:{reason}"
                values[name] = values.get(name, 0.0) + sample.value
        return values

    def is_idle(self) -> bool:
        """Whether nothing runs, waits or holds blocks."""
        counts = self.service.thread.counts
        thread = self.service.thread
        busy = (counts.num_running, counts.num_waiting, counts.reserved_positions)
        return not any((*busy, thread.num_queued, thread.num_running, len(self.service._calls)))


def wait_until(condition: Any, timeout_s: float = WAIT_S) -> None:
    """Wait until a condition holds."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("the condition did not come to hold")


@contextlib.contextmanager
def running(
    llm: LLM, name: str = "model", *, send_buffer: int | None = None, **settings: Any
) -> Iterator[Running]:
    """Serve a model while the block runs. `send_buffer` are the bytes that the system holds for a client."""
    records: list[Mapping[str, Any]] = []
    ready = threading.Event()
    with listen("127.0.0.1", 0) as listener:
        if send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        server = Server(llm, ServerSettings(name, **settings), listener, records.append)
        found = Running(server, records)

        def work() -> None:
            try:
                found.finished = asyncio.run(server.serve(ready.set))
            except Exception as error:  # noqa: BLE001 - it is the test that looks at it
                found.error = error
            ready.set()

        thread = threading.Thread(target=work)
        thread.start()
        assert ready.wait(WAIT_S)
        try:
            yield found
        finally:
            server.stop()
            thread.join(WAIT_S)
            assert not thread.is_alive()
