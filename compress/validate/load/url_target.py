"""A server with the completions interface of OpenAI as a target: streamed `/completions` with token-id
prompts.

All requests run on one event loop of this thread. A request opens a connection of its own, which its TTFT
holds. The server is asked to pass over end-of-sequence tokens (`ignore_eos`, as vLLM, SGLang and `compress
serve` take it) and to state the usage, also the usage so far with every chunk unless it refuses that, which
one request before the first run finds out. A heartbeat measures how late this client itself was: where
`p99_client_lag_ms` is not far below the times that are read, the client was too slow for the load.
"""

import asyncio
import json
import time
from collections import deque
from dataclasses import replace
from typing import Any

from compress.errors import CompressError, StorageError, UsageError
from compress.untrusted.fields import Fields
from compress.untrusted.parse import Malformed, parse_json
from compress.validate.load.completion_chunks import CompletionStream
from compress.validate.load.http_stream import Reply, parse_address, send
from compress.validate.load.served import LoadRun, ServedRequest
from compress.validate.load.workload import LoadRequest, Workload

MAX_ANSWER_BYTES = 4 << 20
SHOWN_BYTES = 300
HEARTBEAT_S = 0.01


class UrlTarget:
    """A server and the name of the model that it serves.

    Raises:
        UsageError: the URL is none, or the key holds characters that no header may have.
    """

    backend = "openai"

    def __init__(self, url: str, model: str, *, api_key: str | None = None, temperature: float = 0.0) -> None:
        self.address = parse_address(url)
        self.model = model
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        self._headers |= _authorization(api_key)
        self._temperature = temperature
        self._states_chunks: bool | None = (
            None  # whether it takes continuous_usage_stats; None: not asked yet
        )

    def run(self, workload: Workload) -> LoadRun:
        """Serve a workload to its end; what a server refuses or breaks off is a failed request."""
        if self._states_chunks is None:
            self._states_chunks = not asyncio.run(self._refuses_stated_chunks(workload))
        return asyncio.run(_UrlRun(self, workload).serve())

    def body(self, workload: Workload, idx: int) -> bytes:
        """Return the body of one request."""
        request = workload.requests[idx]
        content: dict[str, Any] = {
            "model": self.model,
            "prompt": list(request.prompt),
            "max_tokens": request.output_tokens,
            "temperature": self._temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._states_chunks is not False:
            content["stream_options"]["continuous_usage_stats"] = True
        return json.dumps(content).encode()

    async def _refuses_stated_chunks(self, workload: Workload) -> bool:
        """Return whether the server refuses a request for one token because of what it asks to be stated. Any
        other failure is left to the run itself."""
        prompt = workload.requests[0].prompt[:1]
        one = replace(workload, requests=(LoadRequest(prompt, 1),), arrivals_s=None)
        body = self.body(one, 0)
        try:
            async with send(self.address, "POST", "/completions", headers=self._headers, body=body) as reply:
                refused = reply.status in (400, 422)
                async for _ in reply.pieces():
                    pass
                return refused
        except CompressError:
            return False

    async def complete(self, body: bytes) -> CompletionStream:
        """Send one request and return its whole stream.

        Raises:
            StorageError: the server refused it or broke it off.
        """
        stream = CompletionStream()
        async with send(self.address, "POST", "/completions", headers=self._headers, body=body) as reply:
            if reply.status != 200:
                raise StorageError(await _refusal(reply))
            async for content, time_s in reply.pieces():
                stream.feed(content, time_s)
        return stream


class _UrlRun:
    """One run of a workload against a server."""

    def __init__(self, target: UrlTarget, workload: Workload) -> None:
        self._target = target
        self._workload = workload
        self._bodies = [target.body(workload, idx) for idx in range(len(workload.requests))]
        self._served: list[ServedRequest] = []
        self._lags_s: list[float] = []

    async def serve(self) -> LoadRun:
        heartbeat = asyncio.create_task(self._beat())
        started_s = time.perf_counter()
        try:
            if self._workload.arrivals_s is None:
                await self._closed_loop()
            else:
                await self._open_loop(started_s, self._workload.arrivals_s)
        finally:
            heartbeat.cancel()
        served = tuple(sorted(self._served, key=lambda each: each.request_idx))
        return LoadRun(started_s, served, client_lags_s=tuple(self._lags_s))

    async def _closed_loop(self) -> None:
        """Run as many clients as the limit allows; each takes the next request when it is free."""
        waiting = deque(range(len(self._bodies)))
        num_clients = min(self._workload.max_concurrency or len(waiting), len(waiting))
        offline_s = time.perf_counter() if self._workload.max_concurrency is None else None

        async def client() -> None:
            while waiting:
                await self._request(waiting.popleft(), offline_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(client())

    async def _open_loop(self, started_s: float, arrivals_s: tuple[float, ...]) -> None:
        limit = asyncio.Semaphore(self._workload.max_concurrency or len(self._bodies))

        async def limited(idx: int, arrival_s: float) -> None:
            async with limit:
                await self._request(idx, arrival_s)

        async with asyncio.TaskGroup() as group:
            for idx, arrival_s in enumerate(arrivals_s):
                await asyncio.sleep(max(started_s + arrival_s - time.perf_counter(), 0.0))
                group.create_task(limited(idx, started_s + arrival_s))

    async def _request(self, idx: int, arrival_s: float | None) -> None:
        sent_s = time.perf_counter()
        arrived_s = sent_s if arrival_s is None else arrival_s
        num_prompt = len(self._workload.requests[idx].prompt)
        try:
            found = (await self._target.complete(self._bodies[idx])).finish()
        except CompressError as error:
            ended_s = time.perf_counter()
            self._served.append(
                ServedRequest(idx, arrived_s, sent_s, num_prompt, (), ended_s, error=str(error))
            )
            return
        self._served.append(
            ServedRequest(
                idx,
                arrived_s,
                sent_s,
                num_prompt if found.prompt_tokens is None else found.prompt_tokens,
                found.token_times_s,
                found.token_times_s[-1],
                cached_tokens=found.cached_tokens,
                inferred=found.inferred,
            )
        )

    async def _beat(self) -> None:
        while True:
            due_s = time.perf_counter() + HEARTBEAT_S
            await asyncio.sleep(HEARTBEAT_S)
            self._lags_s.append(time.perf_counter() - due_s)


def served_model(url: str, *, api_key: str | None = None) -> str:
    """Return the name of the first model that a server lists.

    Raises:
        UsageError: the URL is none.
        StorageError: nothing answers there, or the answer lists no model.
    """
    address = parse_address(url)

    async def listed() -> bytes:
        async with send(address, "GET", "/models", headers=_authorization(api_key)) as reply:
            if reply.status != 200:
                raise StorageError(f"{address}/models: {await _refusal(reply)}")
            return await reply.content(max_bytes=MAX_ANSWER_BYTES)

    try:
        content = parse_json(asyncio.run(listed()))
    except Malformed as error:
        raise StorageError(f"{address}/models is not JSON: {error}.") from None
    models = Fields(content, f"{address}/models", StorageError).items("data", default=())
    if not models:
        raise StorageError(f"{address} lists no model; name one with --model.")
    return Fields(models[0], f"a model of {address}", StorageError).text("id")


async def _refusal(reply: Reply) -> str:
    """Return what a server answers instead of a completion, in one sentence."""
    content = await reply.content(max_bytes=SHOWN_BYTES)
    text = " ".join(content.decode("utf-8", "replace").split())
    return f"the server answered {reply.status}: {text or 'nothing'}"


def _authorization(api_key: str | None) -> dict[str, str]:
    if api_key is None:
        return {}
    if not api_key.isascii() or not api_key.isprintable():
        raise UsageError("the API key holds characters that no header may have.")
    return {"Authorization": f"Bearer {api_key}"}
