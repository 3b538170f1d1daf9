"""The engine's thread with a scripted engine: what it hears, in which order, and from which thread."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from compress.errors import EnvironmentUnfit, QueueFull, UsageError
from compress.runtime.request import Request, SamplingParams
from compress.serve.engine_thread import EngineThread, Job, Progress
from tests.support.scripted_engine import ScriptedEngine


class Listener:
    """Keeps the progress of one job, and checks that it comes in the event loop."""

    def __init__(self) -> None:
        self.got: list[Progress] = []
        self.done = asyncio.Event()
        self._thread = threading.current_thread()

    def __call__(self, progress: Progress) -> None:
        assert threading.current_thread() is self._thread
        self.got.append(progress)
        if progress.finished is not None or progress.error is not None:
            self.done.set()

    @property
    def tokens(self) -> list[int]:
        return [token for each in self.got for token in each.tokens]


def job(name: str, client: str = "a", num_tokens: int = 3, prompt: tuple[int, ...] = (1, 2)) -> Job:
    return Job(client, prompt, Request(name, prompt, SamplingParams(num_tokens)), Listener())


def heard(each: Job) -> Any:
    return each.receive


def play(engine: ScriptedEngine, script: Callable[[EngineThread], Any], max_queued: int = 100) -> None:
    """Run a coroutine beside the engine's thread."""

    async def run() -> None:
        thread = EngineThread(engine, max_queued=max_queued)  # type: ignore[arg-type]
        thread.start(asyncio.get_running_loop())
        try:
            await asyncio.wait_for(script(thread), 20)
        finally:
            engine.gate.set()
            thread.stop()

    asyncio.run(run())


def test_tokens_come_in_order_and_only_one_thread_touches_the_engine() -> None:
    engine = ScriptedEngine()

    async def script(thread: EngineThread) -> None:
        jobs = [job(f"r{idx}", num_tokens=2 + idx) for idx in range(5)]
        thread.submit(jobs)
        for each in jobs:
            await heard(each).done.wait()
        for idx, each in enumerate(jobs):
            assert heard(each).tokens == list(range(2 + idx))
            assert heard(each).got[-1].finished.reason == "length"
        assert thread.num_running == 0
        assert thread.counts.num_running == 0

    play(engine, script)
    assert engine.threads == {"engine"}


def test_a_flood_of_one_client_does_not_hold_up_another() -> None:
    engine = ScriptedEngine(max_batch_size=2)

    async def script(thread: EngineThread) -> None:
        engine.gate.clear()
        flood = [job(f"flood{idx}", "flood", num_tokens=5) for idx in range(40)]
        thread.submit(flood)
        while thread.num_running < 2:
            await asyncio.sleep(0.001)
        late = [job(f"late{idx}", "late", num_tokens=5) for idx in range(3)]
        thread.submit(late)
        engine.gate.set()
        for each in (*late, *flood):
            await heard(each).done.wait()

    play(engine, script)
    assert {engine.order.index(f"late{idx}") for idx in range(3)} <= {2, 3, 4, 5, 6}


def test_cancelled_jobs_end_at_once_where_they_are() -> None:
    engine = ScriptedEngine(max_batch_size=1, step_s=0.001)

    async def script(thread: EngineThread) -> None:
        first = job("first", num_tokens=10**6)
        second = job("second", num_tokens=2)
        third = job("third", num_tokens=2)
        thread.submit([first, second, third])
        while not heard(first).tokens:
            await asyncio.sleep(0.001)
        assert thread.cancel([second]) == [second]
        assert thread.cancel([first]) == []
        await heard(first).done.wait()
        assert heard(first).got[-1].finished.reason == "cancelled"
        await heard(third).done.wait()
        assert heard(second).got == []
        thread.cancel([first, third])  # both have ended: nothing happens
        await asyncio.sleep(0.01)
        assert (thread.num_running, thread.num_queued) == (0, 0)

    play(engine, script)
    assert engine.order == ["first", "third"]


def test_an_engine_that_refuses_a_request_serves_the_others() -> None:
    async def script(thread: EngineThread) -> None:
        bad = job("bad", prompt=(666,))
        good = job("good")
        thread.submit([bad, good])
        await heard(good).done.wait()
        assert isinstance(heard(bad).got[0].error, UsageError)
        assert heard(good).tokens == [0, 1, 2]
        assert thread.num_running == 0

    play(ScriptedEngine(), script)


def test_a_full_queue_refuses() -> None:
    engine = ScriptedEngine(max_batch_size=1)

    async def script(thread: EngineThread) -> None:
        engine.gate.clear()
        thread.submit([job("running")])
        while thread.num_running < 1:
            await asyncio.sleep(0.001)
        thread.submit([job("one"), job("two")])
        with pytest.raises(QueueFull):
            thread.submit([job("three")])
        assert len(thread.withdraw()) == 2

    play(engine, script, max_queued=4)


def test_a_failing_engine_tells_everybody() -> None:
    engine = ScriptedEngine(max_batch_size=1, fails_at=3)

    async def script(thread: EngineThread) -> None:
        failed = asyncio.Event()
        thread.on_failure = failed.set
        jobs = [job(f"r{idx}", num_tokens=100) for idx in range(3)]
        thread.submit(jobs)
        for each in jobs:
            await heard(each).done.wait()
            assert isinstance(heard(each).got[-1].error, RuntimeError)
        await failed.wait()
        assert isinstance(thread.failure, RuntimeError)
        with pytest.raises(EnvironmentUnfit):
            thread.submit([job("later")])

    play(engine, script)


def test_the_batch_size_of_a_step_is_told() -> None:
    engine = ScriptedEngine(max_batch_size=3)

    async def script(thread: EngineThread) -> None:
        jobs = [job(f"r{idx}") for idx in range(3)]
        thread.submit(jobs)
        for each in jobs:
            await heard(each).done.wait()
            assert {progress.batch_size for progress in heard(each).got} == {3}

    play(engine, script)


@pytest.mark.parametrize(("device", "index"), [("cuda", 3), ("cuda:1", 1)])
def test_it_works_on_the_gpu_of_its_engine(device: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without an index is the current one of the thread that loaded the model, not of a new one."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    engine = ScriptedEngine()
    engine.device = torch.device(device)

    async def script(thread: EngineThread) -> None:
        one = job("r")
        thread.submit([one])
        await heard(one).done.wait()
        assert heard(one).tokens == [0, 1, 2]

    play(engine, script)
    assert chosen == [index]
