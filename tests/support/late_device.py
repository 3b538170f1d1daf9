"""A device that is as late as it may be: what is launched runs when the host waits for it, in order, and
reads memory that the host reaches as it is then.

The engine's own launches go to a queue instead of running at once. `log` has "launch" for every launch of a
decode step or of prefill passes, and "wait" for every wait of the host, each with the number of the launch.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from compress.runtime.decode import PlainDecoding
from compress.runtime.decode_run import HostResults
from compress.runtime.engine import Engine
from compress.runtime.generation import Generation
from compress.runtime.kv_cache import KVCache
from compress.runtime.prefill import PrefilledTokens
from compress.runtime.sampler import SampledTokens


class LateStream:
    """Launches that have not run yet."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self._num_launches = 0
        self.log: list[tuple[str, int]] = []

    def put(self, run: Callable[[], None]) -> None:
        """Add device work to the end of the queue."""
        self._queue.append(run)

    def launched(self) -> int:
        """Return the number of a launch, which is noted."""
        self._num_launches += 1
        self.log.append(("launch", self._num_launches))
        return self._num_launches

    @torch.inference_mode()
    def run_until(self, event: "LateEvent") -> None:
        """Run what is queued until the event has come."""
        while not event.has_come:
            self._queue.popleft()()


@dataclass
class LateEvent:
    """An event of a late stream. `number` is that of the launch before it; None: waits are not noted."""

    stream: LateStream
    number: int | None = None
    has_come: bool = True

    def record(self) -> None:
        """Have the event come when all that was launched so far has run."""
        self.has_come = False
        self.stream.put(self._come)

    def synchronize(self) -> None:
        """Wait for it."""
        if self.number is not None:
            self.stream.log.append(("wait", self.number))
        self.stream.run_until(self)

    def _come(self) -> None:
        self.has_come = True


def make_late(engine: Engine) -> LateStream:
    """Return the stream to which an engine, which decodes plainly on a CPU, launches from now on."""
    stream = LateStream()
    decoding = engine._decoding
    assert isinstance(decoding, PlainDecoding)
    state = decoding._state
    events = [LateEvent(stream) for _ in range(2)]
    state.results[:] = [
        replace(each, done=event)  # type: ignore[arg-type]
        for each, event in zip(state.results, events, strict=True)
    ]
    sent = LateEvent(stream)
    launch, fill, send = decoding.launch, state._loaded.fill, state._send

    def late_fill(*rows: Any) -> None:
        sent.synchronize()
        fill(*rows)

    def late_send(*operands: Any, **options: Any) -> None:
        stream.put(lambda: send(*operands, **options))
        sent.record()

    def late_launch() -> Any:
        step: Callable[[], Any] = decoding._run_step
        events[(decoding._num_launched + 1) % 2].number = stream.launched()
        decoding._run_step = lambda: stream.put(step)  # type: ignore[assignment, return-value]
        tokens = launch()
        decoding._run_step = step
        return tokens

    state._loaded.fill = late_fill  # type: ignore[method-assign, assignment]
    state._send = late_send  # type: ignore[method-assign]
    decoding.launch = late_launch  # type: ignore[method-assign]
    _make_prefill_late(engine, stream)
    _make_cache_late(engine.runner._cache, stream)
    return stream


def _make_cache_late(cache: KVCache, stream: LateStream) -> None:
    """Blocks travel in the order of launches; who reads them waits for all."""
    read, write = cache.read_blocks, cache.write_blocks

    def late_read(blocks_N: torch.Tensor) -> torch.Tensor:
        everything = LateEvent(stream)
        everything.record()
        everything.synchronize()
        return read(blocks_N)

    cache.read_blocks = late_read  # type: ignore[method-assign]
    cache.write_blocks = lambda *operands: stream.put(lambda: write(*operands))  # type: ignore[method-assign]


def _make_prefill_late(engine: Engine, stream: LateStream) -> None:
    prefill = engine._launched._prefill
    compute = prefill._compute

    def late_compute(passes: Any, generations: list[Generation]) -> PrefilledTokens | None:
        number = stream.launched()
        count = len(generations)
        tokens_W = torch.full((count,), -1)
        logprobs_W = torch.zeros(count)
        logits_WV = torch.zeros(count, engine.arch.vocab_size)

        def run() -> None:
            found = compute(passes, generations)
            if found is None:
                return
            tokens_W.copy_(found.sampled.tokens_R)
            logits_WV.copy_(found.logits_WV)
            if found.sampled.logprobs_R is not None:
                logprobs_W.copy_(found.sampled.logprobs_R)

        stream.put(run)
        if not generations:
            return None
        has_logprobs = any(each.request.params.logprobs for each in generations)
        results = HostResults(tokens_W, logprobs_W, LateEvent(stream, number))  # type: ignore[arg-type]
        results.record()
        return PrefilledTokens(
            generations, logits_WV, SampledTokens(tokens_W, logprobs_W if has_logprobs else None), results
        )

    prefill._compute = late_compute  # type: ignore[method-assign]
