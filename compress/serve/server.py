"""The server: a socket, an event loop and a service, from start to an orderly end.

SIGTERM or SIGINT stop it: new requests are refused with status 503, those that wait too, and those that run
may finish within the grace time. A second signal ends it at once.
"""

import asyncio
import contextlib
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator

import uvicorn

from compress.errors import EnvironmentUnfit, Interrupted
from compress.llm import LLM
from compress.serve.app import build_app
from compress.serve.connection import connection_class
from compress.serve.service import Log, Service
from compress.serve.settings import ServerSettings

_SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep Python's lock from another that wants it. With 64 streams over steps of 2 ms,
on two cores of a shared AMD host, a step took 3.2 ms (median); with Python's default of 5 ms it took 7.6."""
_END_S = 5
_BACKLOG = 2048
_OTHER_FILES = 256


class Server:
    """A service with its socket.

    `url` is where it listens. `stop` may be called from any thread or signal handler: the first call lets
    running requests finish, a second one does not.
    """

    def __init__(self, llm: LLM, settings: ServerSettings, listener: socket.socket, log: Log) -> None:
        self._llm = llm
        self._settings = settings
        self._listener = listener
        self._address = listener.getsockname()[:2]
        self._log = log
        self._stop_asked = asyncio.Event()
        self._hurry = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.service: Service | None = None

    @property
    def url(self) -> str:
        """The address on which the server listens."""
        host, port = self._address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def stop(self) -> None:
        """Ask the server to end."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._note_stop)

    def _note_stop(self) -> None:
        (self._hurry if self._stop_asked.is_set() else self._stop_asked).set()

    async def serve(self, ready: Callable[[], None] = lambda: None) -> bool:
        """Serve until `stop`, and return whether all running requests could finish. `ready` is called once
        requests are accepted.

        Raises:
            EnvironmentUnfit: the engine has failed, or another program listens at the address by now.
        """
        self._loop = asyncio.get_running_loop()
        service = self.service = Service(self._llm, self._settings, self._log)
        server = _Uvicorn(
            uvicorn.Config(
                build_app(service),
                http=connection_class(self._settings),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=_END_S,
            )
        )
        service.start()
        running = asyncio.create_task(server.serve(sockets=[self._listener]))
        try:
            while not server.started and not running.done():
                await asyncio.sleep(0.005)
            if server.started:
                ready()
                await _first_of(self._stop_asked.wait(), service.failed.wait(), asyncio.shield(running))
        finally:
            hurry = asyncio.create_task(self._hurry.wait())
            drained = asyncio.create_task(service.drain(self._settings.grace_s))
            await asyncio.wait({hurry, drained}, return_when=asyncio.FIRST_COMPLETED)
            finished = drained.done() and drained.result()
            if not drained.done():
                drained.cancel()
                await asyncio.gather(drained, return_exceptions=True)
                await service.drain(0)
            hurry.cancel()
            server.should_exit = True
            try:
                await running
            except OSError as error:
                if server.started:
                    raise
                host, port = self._address
                raise _cannot_listen(host, port, error) from None
        if service.thread.failure is not None:
            raise EnvironmentUnfit(
                f"the engine has failed: {service.thread.failure!r:.500}. Start the server again."
            ) from service.thread.failure
        return finished


class _Uvicorn(uvicorn.Server):
    """uvicorn's server without handlers of signals, which are those of `Server`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address; port 0 is any free one.

    Raises:
        EnvironmentUnfit: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise _cannot_listen(host, port, error) from None
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> EnvironmentUnfit:
    return EnvironmentUnfit(
        f"cannot listen on {host}, port {port}: {error.strerror or error}. Choose others with --host and "
        "--port."
    )


def serve(
    llm: LLM, settings: ServerSettings, listener: socket.socket, *, log: Log, ready: Callable[[str], None]
) -> None:
    """Serve a model until SIGTERM or SIGINT; to be called in the main thread. `ready` is called with the URL.

    Raises:
        Interrupted: a signal ended the server, as signals are meant to.
        EnvironmentUnfit: the engine has failed, or another program listens at the address by now.
    """
    received: list[signal.Signals] = []

    async def run() -> bool:
        server = Server(llm, settings, listener, log)
        loop = asyncio.get_running_loop()

        def on_signal(number: signal.Signals) -> None:
            received.append(number)
            server.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        return await server.serve(lambda: ready(server.url))

    _allow_files(settings.max_connections + _OTHER_FILES)
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        new_loop = uvicorn.Config(_no_app, log_config=None).get_loop_factory()
        with asyncio.Runner(loop_factory=new_loop) as runner:
            finished = runner.run(run())
    finally:
        sys.setswitchinterval(before)
    number = received[0] if received else signal.SIGTERM
    outcome = "every running request finished" if finished else "some running requests were cut off"
    raise Interrupted(f"the server was stopped by {number.name}; {outcome}.", signal_number=number)


def _allow_files(num: int) -> None:
    """Raise the limit of open files of this process to `num`, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num if hard == resource.RLIM_INFINITY else min(num, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _first_of(*waits: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _no_app(scope: object, receive: object, send: object) -> None:
    """Do nothing: only uvicorn's choice of an event loop is asked for."""
