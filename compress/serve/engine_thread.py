"""The thread that runs the engine: nothing else calls it.

The event loop submits and cancels jobs under a lock, which the thread takes once a step. Between two steps
the thread takes as many jobs from the fair queue as the engine has free rows, scores at most one prompt,
and sends everything that the step gave to the event loop in one call. Tokenizing and detokenizing are done
elsewhere.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from compress.errors import CompressError, EnvironmentUnfit
from compress.runtime.engine import Engine
from compress.runtime.prompt_logprobs import PromptLogprobs, score_prompt
from compress.runtime.request import EngineCounts, Finished, Request, TopLogprobs
from compress.serve.fair_queue import FairQueue

_COUNTS_INTERVAL_S = 0.1
_GATHERING_WAIT_S = 0.001
"""The pause after a step in which nothing ran, because a group of a static or dynamic batch gathers."""


@dataclass(frozen=True)
class Progress:
    """The outcome of one step of the engine for a job.

    `tokens` came at `now_s`, a moment of `time.perf_counter`, in a step that served `batch_size` requests;
    `logprobs` and `top_logprobs` are theirs where the request asked for them. `prompt_logprobs` come once,
    before all tokens. The last progress of a job has `finished` or `error`, or is the scoring of a job
    without a request.
    """

    now_s: float
    tokens: Sequence[int] = ()
    batch_size: int = 0
    logprobs: Sequence[float] = ()
    top_logprobs: Sequence[TopLogprobs] = ()
    prompt_logprobs: PromptLogprobs | None = None
    finished: Finished | None = None
    error: Exception | None = None


@dataclass(eq=False)
class Job:
    """A request for the engine (None: only score the prompt), and who waits for it.

    `receive` is called with each progress, in the event loop. With `num_scored_top` the prompt is scored
    before the request is added, with so many of the likeliest tokens of each position.
    """

    client: str
    prompt: tuple[int, ...]
    request: Request | None
    receive: Callable[[Progress], None]
    priority: int = 0
    num_scored_top: int | None = None
    num_read: int = field(default=0, init=False)


class EngineThread:
    """Runs an engine in a thread of its own, for jobs of an event loop.

    `counts` are those of the engine, at most a tenth of a second old while it runs, and exact while it rests.
    `failure` is the error that ended the thread, if one did; `on_failure` is then called in the event loop.
    """

    def __init__(self, engine: Engine, *, max_queued: int) -> None:
        self._engine = engine
        self._gpu = _gpu_of(engine.device)
        self._capacity = engine.config.max_batch_size
        self._changed = threading.Condition()
        self._queue = FairQueue[Job](max_queued)  # this and the next two under the lock
        self._cancelled: list[Job] = []
        self._stopping = False
        self._starting: list[Job] = []
        self._running: dict[str, Job] = {}
        self._num_taken = 0  # jobs that left the queue and have not ended
        self._counts_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.counts: EngineCounts = engine.counts
        self.failure: Exception | None = None
        self.on_failure: Callable[[], None] = lambda: None

    @property
    def num_queued(self) -> int:
        """Jobs that wait for a free row."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Jobs that the engine has."""
        return self._num_taken

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; progress goes to `loop`."""
        self._loop = loop
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the jobs of one client, all or none.

        Raises:
            QueueFull: there is no place for them.
            EnvironmentUnfit: the thread has ended.
        """
        with self._changed:
            if self._stopping:
                raise EnvironmentUnfit("the engine has stopped.")
            self._queue.add(jobs)
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> list[Job]:
        """Cancel jobs. Those that wait leave the queue, hear nothing more and are returned; those that run
        end after the step with a last progress.
        """
        with self._changed:
            waiting = [job for job in jobs if self._queue.remove(job)]
            self._cancelled += [job for job in jobs if job not in waiting]
            self._changed.notify()
        return waiting

    def withdraw(self) -> list[Job]:
        """Remove all jobs that wait, and return them; they hear nothing more."""
        with self._changed:
            return self._queue.drain()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread after its step, and wait for that."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            if self._gpu is not None:
                torch.cuda.set_device(self._gpu)
            while self._round():
                pass
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            self._fail(error)

    def _round(self) -> bool:
        """Take what is new, run one step, and send what it gave; return whether to go on."""
        new, cancelled = self._take()
        if self._stopping:
            return False
        given: list[tuple[Job, Progress]] = []
        for job in cancelled:
            self._cancel(job, given)
        self._starting = new
        while self._starting:
            self._begin(self._starting[0], given)
            del self._starting[0]
        finished = self._engine.step() if self._engine.has_work else []
        self._collect(finished, given)
        self._note_counts()
        self._send(given)
        if not given and self._running and self._engine.counts.num_running == 0:
            time.sleep(_GATHERING_WAIT_S)
        return True

    def _take(self) -> tuple[list[Job], list[Job]]:
        """Return the jobs to begin and those to cancel; wait while there is nothing to do."""
        with self._changed:
            while not (self._stopping or self._cancelled or len(self._queue) or self._engine.has_work):
                self._changed.wait()
            new: list[Job] = []
            while self._num_taken < self._capacity and (job := self._queue.take()) is not None:
                self._num_taken += 1
                new.append(job)
                if job.num_scored_top is not None:
                    break  # a prompt is scored by itself: one between two steps
            cancelled = self._cancelled
            self._cancelled = []
            return new, cancelled

    def _begin(self, job: Job, given: list[tuple[Job, Progress]]) -> None:
        """Score the prompt, if that was asked for, and add the request, if there is one."""
        try:
            scored = None
            if job.num_scored_top is not None:
                scored = score_prompt(self._engine, job.prompt, num_top=job.num_scored_top)
            if job.request is not None:
                self._engine.add(job.request)
                self._running[job.request.id] = job
        except (CompressError, torch.OutOfMemoryError) as error:
            self._end(job)
            given.append((job, Progress(time.perf_counter(), error=error)))
            return
        if scored is not None:
            given.append((job, Progress(time.perf_counter(), prompt_logprobs=scored)))
        if job.request is None:
            self._end(job)

    def _cancel(self, job: Job, given: list[tuple[Job, Progress]]) -> None:
        if job.request is None or self._running.get(job.request.id) is not job:
            return  # it has ended by itself
        given.append(self._last(job, self._engine.cancel(job.request.id), time.perf_counter(), 0))

    def _collect(self, finished: Sequence[Finished], given: list[tuple[Job, Progress]]) -> None:
        """Add what the step gave to each running job."""
        now_s = time.perf_counter()
        batch_size = len(self._running)
        for each in finished:
            given.append(self._last(self._running[each.id], each, now_s, batch_size))
        for request_id, job in self._running.items():
            tokens = self._engine.tokens_of(request_id, start=job.num_read)
            if not tokens:
                continue
            params = job.request.params if job.request is not None else None
            logprobs: Sequence[float] = ()
            top_logprobs: Sequence[TopLogprobs] = ()
            if params is not None and params.logprobs:
                logprobs = self._engine.logprobs_of(request_id, start=job.num_read)
            if params is not None and params.top_logprobs:
                top_logprobs = self._engine.top_logprobs_of(request_id, start=job.num_read)
            job.num_read += len(tokens)
            given.append((job, Progress(now_s, tokens, batch_size, logprobs, top_logprobs)))

    def _last(self, job: Job, finished: Finished, now_s: float, batch_size: int) -> tuple[Job, Progress]:
        """Return the last progress of a job that has ended in the engine."""
        del self._running[finished.id]
        self._end(job)
        start = job.num_read
        return job, Progress(
            now_s,
            finished.tokens[start:],
            batch_size,
            (finished.logprobs or ())[start:],
            (finished.top_logprobs or ())[start:],
            finished=finished,
        )

    def _end(self, job: Job) -> None:
        with self._changed:
            self._num_taken -= 1
            self._queue.release(job.client)

    def _note_counts(self) -> None:
        now_s = time.perf_counter()
        if not self._running or now_s - self._counts_s >= _COUNTS_INTERVAL_S:
            self._counts_s = now_s
            self.counts = self._engine.counts

    def _send(self, given: Sequence[tuple[Job, Progress]]) -> None:
        if given and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(_deliver, given)
            except RuntimeError:  # the event loop has ended, and all who waited with it
                with self._changed:
                    self._stopping = True

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._stopping = True
            left = [*self._starting, *self._running.values(), *self._queue.drain()]
        self._running.clear()
        self.failure = error
        now_s = time.perf_counter()
        self._send([(job, Progress(now_s, error=error)) for job in left])
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.on_failure)


def _deliver(given: Sequence[tuple[Job, Progress]]) -> None:
    for job, progress in given:
        job.receive(progress)


def _gpu_of(device: torch.device) -> int | None:
    """Return the index of a GPU, and of the calling thread's current one where the device names none: a new
    thread begins with the first; None of another device."""
    if device.type != "cuda":
        return None
    return device.index if device.index is not None else torch.cuda.current_device()
