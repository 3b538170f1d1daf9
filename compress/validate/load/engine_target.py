"""The bundled engine as a target: a loop adds requests at their arrival and steps, in this thread.

A request that arrives while a step runs is added when the step has ended, as in any engine with one loop; its
times count from its arrival. The engine's counts are sampled after a step, at most every `SAMPLE_S`.
"""

from collections import deque
from typing import TYPE_CHECKING, Protocol

from compress.errors import QueueFull
from compress.runtime.request import EngineCounts, Request, SamplingParams
from compress.validate.load.served import EngineUse, LoadRun, Sample, ServedRequest
from compress.validate.load.target import Clock, WallClock
from compress.validate.load.workload import Workload

if TYPE_CHECKING:
    from compress.runtime.request import Finished

SAMPLE_S = 0.005


class Stepped(Protocol):
    """The part of `Engine` that a load needs."""

    @property
    def has_work(self) -> bool: ...

    @property
    def counts(self) -> EngineCounts: ...

    def add(self, request: Request) -> None: ...

    def flush(self) -> None: ...

    def step(self) -> "list[Finished]": ...


class EngineTarget:
    """An engine in this process, with the name of its model."""

    backend = "compress"

    def __init__(self, engine: Stepped, model: str, *, clock: Clock | None = None) -> None:
        self.model = model
        self._engine = engine
        self._clock = clock if clock is not None else WallClock()
        self._num_runs = 0

    @property
    def engine(self) -> Stepped:
        """The engine itself."""
        return self._engine

    def run(self, workload: Workload) -> LoadRun:
        """Serve a workload to its end.

        Raises:
            UsageError: a request is longer than the engine's longest sequence, or has unknown tokens.
        """
        self._num_runs += 1
        return _EngineRun(self._engine, workload, self._clock, f"load-{self._num_runs}-").serve()


class _EngineRun:
    """One run of a workload, as it goes on."""

    def __init__(self, engine: Stepped, workload: Workload, clock: Clock, prefix: str) -> None:
        self._engine = engine
        self._workload = workload
        self._clock = clock
        self._prefix = prefix
        self._waiting = deque(range(len(workload.requests)))
        self._open: dict[str, tuple[int, float, float]] = {}
        self._served: list[ServedRequest] = []
        self._samples: list[Sample] = []
        self._free_s = 0.0

    def serve(self) -> LoadRun:
        before = self._engine.counts
        started_s = self._free_s = self._clock.now()
        while self._waiting or self._engine.has_work:
            self._add_due(started_s)
            if not self._waiting or self._is_full:
                self._engine.flush()  # a group of static batching that no request can join any more
            if self._engine.has_work:
                self._step()
            elif self._waiting and self._workload.arrivals_s is not None:
                due_s = started_s + self._workload.arrivals_s[self._waiting[0]]
                self._clock.sleep(max(due_s - self._clock.now(), 0.0))
        counts = self._engine.counts
        self._sample(counts, self._clock.now())
        use = EngineUse(
            counts.cache_positions,
            tuple(self._samples),
            prefix_queried=counts.prefix_queried - before.prefix_queried,
            prefix_hits=counts.prefix_hits - before.prefix_hits,
            evictions=counts.evictions - before.evictions,
            preemptions=counts.preemptions - before.preemptions,
            swapped_out=counts.swapped_out - before.swapped_out,
            swapped_in=counts.swapped_in - before.swapped_in,
        )
        return LoadRun(started_s, tuple(sorted(self._served, key=lambda each: each.request_idx)), use)

    def _add_due(self, started_s: float) -> None:
        """Add every request that has arrived and that the limit of concurrency admits."""
        arrivals_s = self._workload.arrivals_s
        while self._waiting and not self._is_full:
            idx = self._waiting[0]
            now = self._clock.now()
            arrival_s = self._free_s if arrivals_s is None else started_s + arrivals_s[idx]
            if arrival_s > now:
                return
            self._waiting.popleft()
            self._add(idx, arrival_s, now)

    @property
    def _is_full(self) -> bool:
        """Whether no request may be sent before another has ended."""
        limit = self._workload.max_concurrency
        return limit is not None and len(self._open) >= limit

    def _add(self, idx: int, arrival_s: float, now: float) -> None:
        own = self._workload.requests[idx]
        request_id = f"{self._prefix}{idx}"
        params = SamplingParams(max_tokens=own.output_tokens, ignore_eos=True)
        try:
            self._engine.add(Request(request_id, own.prompt, params))
        except QueueFull as error:
            refused = ServedRequest(idx, arrival_s, now, len(own.prompt), (), now, error=str(error))
            self._served.append(refused)
            return
        self._open[request_id] = (idx, arrival_s, now)

    def _step(self) -> None:
        finished = self._engine.step()
        now = self._clock.now()
        for done in finished:
            idx, arrival_s, sent_s = self._open.pop(done.id)
            whole = len(done.tokens) == self._workload.requests[idx].output_tokens
            self._served.append(
                ServedRequest(
                    idx,
                    arrival_s,
                    sent_s,
                    len(done.prompt),
                    done.token_times_s,
                    done.token_times_s[-1] if done.token_times_s else now,
                    cached_tokens=done.cached_tokens,
                    error="" if whole else f"ended with {len(done.tokens)} tokens ({done.reason})",
                )
            )
        if finished:
            self._free_s = now
        idle = not self._engine.has_work  # the sample holds until the next request
        if idle or not self._samples or now - self._samples[-1].time_s >= SAMPLE_S:
            self._sample(self._engine.counts, now)

    def _sample(self, counts: EngineCounts, now: float) -> None:
        self._samples.append(
            Sample(now, counts.num_running, counts.num_waiting, counts.reserved_positions, counts.live_tokens)
        )
