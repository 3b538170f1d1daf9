"""One generating request over HTTP: from its body to its answer, whole or as a stream of events.

A stream is server-sent events: `data: {...}` for each chunk, and `data: [DONE]` at the end. Its status is
that of the first chunk, so a request that fails before it has an HTTP error. What has come while the last
event was being sent is sent at once, so a slow client gets fewer and longer events.
"""

import asyncio
import json
import logging
import time
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from compress.serve.body import read_body
from compress.serve.call import Call
from compress.serve.endpoint import Endpoint
from compress.serve.refusal import Refusal
from compress.serve.service import Service, refusal_of

_LOG = logging.getLogger("compress.serve")
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_LINE_ENDS = {char: f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}
"""Characters beyond ASCII at which some clients (httpx, Python's `splitlines`) end a line of a stream."""
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Generate:
    """The ASGI application of one endpoint."""

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        self._service = service
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        client = "unknown"
        try:
            address = None if request.client is None else request.client.host
            client = self._service.clients.identify(request.headers, address)
            self._service.enter(client)
            try:
                await self._serve(request, client, send)
            finally:
                self._service.exit(client)
        except ClientDisconnect:
            self._service.metrics.disconnected()
            self._note({"client": client, "status": 499, "reason": "abort", "disconnected": True})
        except Refusal as refusal:
            self._note({"client": client, "status": refusal.status, "error": refusal.message})
            await error_response(refusal)(scope, receive, send)

    async def _serve(self, request: Request, client: str, send: Send) -> None:
        service = self._service
        reading = read_body(request, service.settings, service.held, client)
        body = await service.unless_draining(reading)
        arrival_s = time.perf_counter()
        num_bytes = len(body)
        try:
            ask = await service.prepare(self._endpoint, body, client)
        finally:
            del body
            service.held.give_back(client, num_bytes)
        call = service.begin(self._endpoint, ask, client=client, arrival_s=arrival_s)
        watch = asyncio.create_task(_watch(request.receive, call))
        status = 499
        try:
            if ask.stream:
                status = await self._stream(call, send)
            else:
                status = await self._answer(call, request.scope, request.receive, send)
        except Refusal as refusal:
            status = refusal.status
            raise
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
            await asyncio.shield(service.end(call))
            self._note({**call.log_record(), "status": status})

    async def _answer(self, call: Call, scope: Scope, receive: Receive, send: Send) -> int:
        """Send the whole answer and return the status."""
        while True:
            _raise_error(call)
            call.keep()
            if call.done:
                break
            await call.wait()
            if call.left:
                return 499
        content = await self._service.away(lambda: _json(call.answer()))
        headers = {"x-request-id": call.id}
        response = Response(content, media_type="application/json", headers=headers)
        await response(scope, receive, send)
        return 200

    async def _stream(self, call: Call, send: Send) -> int:
        """Send the answer as events and return the status."""
        started = False
        while True:
            if (failure := call.error) is not None:
                _log_defect(failure)
                if not started:
                    raise refusal_of(failure)
                await _send_events(send, [_json(refusal_of(failure).as_json())])
                break
            ended = call.done  # before the chunks are taken: more may come while they are sent
            chunks = await self._chunks(call)
            if chunks and not started:
                started = True
                headers = [*_STREAM_HEADERS, (b"x-request-id", call.id.encode())]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            if chunks:
                await _send_events(send, chunks)
            if ended:
                break
            await call.wait()
            if call.left:
                return 499
        if call.ask.include_usage and call.error is None:
            await _send_events(send, [_json(call.usage_chunk())])
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
        return 200

    async def _chunks(self, call: Call) -> list[bytes]:
        if call.ask.echo:  # prompts and their log probabilities may be long
            return await self._service.away(lambda: [_json(each) for each in call.chunks()])
        return [_json(each) for each in call.chunks()]

    def _note(self, record: dict[str, Any]) -> None:
        self._service.log({"time": round(time.time(), 3), "path": self._endpoint.path, **record})


def error_response(refusal: Refusal) -> JSONResponse:
    """Return a refusal as a response."""
    return JSONResponse(refusal.as_json(), refusal.status, headers=dict(refusal.headers))


async def _watch(receive: Receive, call: Call) -> None:
    """Wait until the client has gone, and note that."""
    while (await receive())["type"] != "http.disconnect":
        pass
    call.leave()


async def _send_events(send: Send, documents: list[bytes]) -> None:
    body = b"".join(b"data: " + each + b"\n\n" for each in documents)
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _raise_error(call: Call) -> None:
    if call.error is not None:
        _log_defect(call.error)
        raise refusal_of(call.error)


def _log_defect(error: Exception) -> None:
    if refusal_of(error).status == 500:
        _LOG.error("a request failed: %s", error, exc_info=error)


def _json(document: dict[str, Any]) -> bytes:
    text = _ENCODER.encode(document)
    for char, escaped in _LINE_ENDS.items():
        text = text.replace(char, escaped)
    return text.encode("utf-8", "replace")
