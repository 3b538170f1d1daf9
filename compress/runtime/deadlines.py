"""The moments at which requests must have ended."""

import heapq

from compress.runtime.request import Request


class Deadlines:
    """The deadlines of requests, the earliest first; those of requests that ended in time are dropped when
    they pass.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def add(self, request: Request) -> None:
        """Note the deadline of a request, if it has one."""
        if request.deadline_s is not None:
            heapq.heappush(self._heap, (request.deadline_s, request.id))

    def passed(self, now_s: float) -> list[tuple[float, str]]:
        """Return the deadlines that have passed since the last call, with the ids of their requests."""
        passed: list[tuple[float, str]] = []
        while self._heap and self._heap[0][0] <= now_s:
            passed.append(heapq.heappop(self._heap))
        return passed
