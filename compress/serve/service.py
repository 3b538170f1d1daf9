"""The service that all endpoints use: it admits calls, prepares them away from the event loop, and ends in
order.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from compress.data.token_text import TokenTexts
from compress.errors import CompressError, EnvironmentUnfit, QueueFull, UsageError, did_you_mean
from compress.llm import LLM
from compress.serve.ask import Ask
from compress.serve.body_fields import parse_body
from compress.serve.call import Call
from compress.serve.clients import Clients
from compress.serve.endpoint import Endpoint
from compress.serve.engine_thread import EngineThread, Progress
from compress.serve.metrics import Metrics
from compress.serve.refusal import Refusal, queue_full, shutting_down
from compress.serve.settings import ServerSettings
from compress.serve.shares import Shares

T = TypeVar("T")
Log = Callable[[Mapping[str, Any]], None]
_PREPARING_THREADS = 2
_SETTLE_S = 5.0


@dataclass
class _Turn:
    """The right of one client to have a body prepared, and how many of its requests have it or want it."""

    lock: asyncio.Lock
    num_waiting: int = 0


class Service:
    """An engine with its thread, its limits and its metrics, for the HTTP side.

    `log` is called with one record for each request. `failed` is set when the engine has ended by an error.
    """

    def __init__(self, llm: LLM, settings: ServerSettings, log: Log) -> None:
        self.llm = llm
        self.settings = settings
        self.log = log
        self.started_at = int(time.time())
        self.thread = EngineThread(llm.engine, max_queued=settings.max_queued)
        self.metrics = Metrics(llm, self.thread, settings.model_name)
        self.clients = Clients(settings.api_keys)
        self.texts = TokenTexts(llm.tokenizer)
        self.held = Shares(settings.max_held_bytes)
        self.draining = False
        self.failed = asyncio.Event()
        self._drains = asyncio.Event()
        self._in_flight = Shares(settings.max_calls)
        self._calls: set[Call] = set()
        self._pool = ThreadPoolExecutor(_PREPARING_THREADS, thread_name_prefix="prepare")
        self._turns: dict[str, _Turn] = {}

    def start(self) -> None:
        """Start the engine's thread for the running event loop."""
        self.thread.on_failure = self.failed.set
        self.thread.start(asyncio.get_running_loop())

    def enter(self, client: str) -> None:
        """Count a request of a client as being served.

        Raises:
            Refusal: the server is about to end, or serves too many requests already.
        """
        self._check_open()
        if not self._in_flight.take(client):
            raise queue_full(
                f"{self._in_flight.total} requests are being served, and this client has its share of them; "
                "try again later."
            )

    def exit(self, client: str) -> None:
        """Count a request of a client as served."""
        self._in_flight.give_back(client)

    async def unless_draining(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns. It is cancelled once the server begins to end.

        Raises:
            Refusal: the server is about to end.
        """
        task = asyncio.create_task(work)
        drains = asyncio.create_task(self._drains.wait())
        try:
            await asyncio.wait({task, drains}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            for each in (task, drains):
                each.cancel()
            await asyncio.gather(task, drains, return_exceptions=True)
        raise shutting_down()

    async def prepare(self, endpoint: Endpoint, body: bytes, client: str) -> Ask:
        """Return what a body asks for, read and tokenized in another thread. One body of a client is prepared
        at a time, so that one with many long ones does not delay the others.

        Raises:
            Refusal: something in it is wrong.
        """
        turn = self._turns.setdefault(client, _Turn(asyncio.Lock()))
        turn.num_waiting += 1
        try:
            async with turn.lock:
                return await self.away(lambda: self._read(endpoint, body))
        finally:
            turn.num_waiting -= 1
            if not turn.num_waiting:
                del self._turns[client]

    async def away(self, work: Callable[[], Any]) -> Any:
        """Return what a function returns in a thread other than those of the event loop and the engine."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def begin(self, endpoint: Endpoint, ask: Ask, *, client: str, arrival_s: float) -> Call:
        """Queue the texts of a request.

        Raises:
            Refusal: there is no place for them, or the server is about to end.
        """
        self._check_open()
        timeout_s = self.settings.request_timeout_s
        call = Call(
            endpoint,
            ask,
            client=client,
            arrival_s=arrival_s,
            deadline_s=None if timeout_s is None else arrival_s + timeout_s,
            llm=self.llm,
            thread=self.thread,
            metrics=self.metrics,
            texts=self.texts,
            model_name=self.settings.model_name,
        )
        try:
            call.submit()
        except CompressError as error:
            raise refusal_of(error) from None
        self._calls.add(call)
        return call

    async def end(self, call: Call) -> None:
        """Cancel what is left of a call, wait for its blocks to be free, and count it."""
        try:
            await call.settle()
        finally:
            self._calls.discard(call)
        if call.left:
            self.metrics.disconnected()

    async def drain(self, grace_s: float) -> bool:
        """Refuse new requests and those that wait, let the running ones finish within the grace time, cancel
        the rest, and end the engine's thread. Return whether all running ones finished.
        """
        self.draining = True
        self._drains.set()
        for job in self.thread.withdraw():
            job.receive(Progress(time.perf_counter(), error=shutting_down()))
        finished = await self._wait_for_calls(grace_s)
        for call in list(self._calls):
            self.thread.cancel([each.job for each in call.choices if each.job is not None])
        await self._wait_for_calls(_SETTLE_S)
        await asyncio.to_thread(self.thread.stop)
        self._pool.shutdown(wait=False, cancel_futures=True)
        return finished

    async def _wait_for_calls(self, timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        while self._calls and time.monotonic() < end_s and not self.failed.is_set():
            await asyncio.sleep(0.02)
        return not self._calls

    def _check_open(self) -> None:
        if self.draining:
            raise shutting_down()
        if self.failed.is_set() or self.thread.failure is not None:
            raise Refusal("the engine has failed; the server ends.", status=503, code="engine_failed")

    def _read(self, endpoint: Endpoint, body: bytes) -> Ask:
        fields = parse_body(body, endpoint.known)
        name = fields.text("model", default=self.settings.model_name)
        if name != self.settings.model_name:
            hint = did_you_mean(name, [self.settings.model_name])
            raise Refusal(
                f"there is no model '{name[:80]}' here.{hint}",
                status=404,
                param="model",
                code="model_not_found",
            )
        try:
            return endpoint.read(fields, self.llm, self.settings)
        except CompressError as error:
            raise refusal_of(error) from error


def refusal_of(error: Exception) -> Refusal:
    """Return the refusal that a client gets for an error; an internal error comes without details."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, QueueFull):
        return queue_full(str(error))
    if isinstance(error, UsageError):
        return Refusal(str(error))
    if isinstance(error, torch.OutOfMemoryError):
        return Refusal("there is not enough memory for this request now.", status=503, retry_after_s=1)
    if isinstance(error, EnvironmentUnfit):
        return Refusal(str(error), status=503)
    return Refusal("an internal error; the server's log has it.", status=500, code="internal_error")
