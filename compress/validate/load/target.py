"""The protocol of what serves a workload, and the clock that it runs on."""

import time
from dataclasses import dataclass
from typing import Protocol

from compress.validate.load.served import LoadRun
from compress.validate.load.workload import Workload


class Clock(Protocol):
    """Seconds that only grow, and a way to wait."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


@dataclass(frozen=True)
class WallClock:
    """The clock of `Finished.token_times_s`."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class LoadTarget(Protocol):
    """Something that serves requests. `backend` and `model` name it in results."""

    @property
    def backend(self) -> str: ...

    @property
    def model(self) -> str: ...

    def run(self, workload: Workload) -> LoadRun:
        """Serve a workload to its end and return what each request got. A request that fails is in the result
        with its error.

        Raises:
            UsageError: a request can never be served, or nothing answers at the address.
        """
