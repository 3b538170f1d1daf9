"""When requests may join a batch: at any step (continuous batching), or only as a group of their own.

    continuous    whenever there is room
    static        when the last group has ended and as many requests wait as a batch holds
    dynamic       as static, but a smaller group also begins when its first request has waited long enough

The last two are what servers did before continuous batching; they are here to be compared with it. `flush`
begins a static group that will never be full.
"""

from typing import Literal

from compress.runtime.waiting_queue import WaitingQueue

Policy = Literal["continuous", "static", "dynamic"]
POLICIES: tuple[Policy, ...] = ("continuous", "static", "dynamic")


class Batching:
    """The policy of an engine. A dynamic group begins `delay_s` after its first request came, or before."""

    def __init__(self, max_batch_size: int, *, policy: Policy = "continuous", delay_s: float = 0.0) -> None:
        self._max_batch_size = max_batch_size
        self._policy = policy
        self._delay_s = delay_s
        self._num_to_come = 0
        self.flush = False

    def is_open(self, waiting: WaitingQueue, num_running: int, now_s: float) -> bool:
        """Return whether the next of the waiting requests may be admitted now."""
        if self._policy == "continuous" or waiting.has_preempted or self._num_to_come:
            return True
        if num_running or not waiting:
            return False
        if len(waiting) >= self._max_batch_size or self.flush or self._has_waited(waiting, now_s):
            self._num_to_come = min(len(waiting), self._max_batch_size)
        return self._num_to_come > 0

    def admitted(self) -> None:
        """Note that one of the group was admitted."""
        self._num_to_come = max(0, self._num_to_come - 1)

    def left(self, num_waiting: int) -> None:
        """Note that the queue has only so many requests left, some having been cancelled."""
        self._num_to_come = min(self._num_to_come, num_waiting)

    def _has_waited(self, waiting: WaitingQueue, now_s: float) -> bool:
        first = waiting.longest_waiting
        return self._policy == "dynamic" and first is not None and now_s - first.arrival_s >= self._delay_s
