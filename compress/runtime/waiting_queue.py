"""The queue of waiting requests, and whose turn it is.

Requests that lost their blocks come first, in the order in which they were admitted. Of the others, a lower
`priority` comes first, and among equals the one that came first or, with `shortest_first`, the one with the
fewest tokens, prompt and continuation added. The request that has waited longest is overtaken by at most
`MAX_OVERTAKES` requests: then it is next, so nobody starves.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import count

from compress.errors import QueueFull
from compress.runtime.generation import Generation

MAX_OVERTAKES = 64


class WaitingQueue:
    """Requests in the order of their turns; at most `limit` of them, but for those that lost their blocks
    (None: any number).
    """

    def __init__(self, *, shortest_first: bool = False, limit: int | None = None) -> None:
        self._shortest_first = shortest_first
        self._limit = limit
        self._preempted: deque[Generation] = deque()
        self._oldest_first: dict[Generation, None] = {}
        self._turns: list[tuple[int, int, int, Generation]] = []
        self._numbers = count()
        self._num_overtakes = 0

    def __len__(self) -> int:
        return len(self._preempted) + len(self._oldest_first)

    def __iter__(self) -> Iterator[Generation]:
        yield from self._preempted
        yield from self._oldest_first

    def __contains__(self, generation: object) -> bool:
        return generation in self._oldest_first or generation in self._preempted

    @property
    def has_preempted(self) -> bool:
        """Whether some request here has lost its blocks."""
        return bool(self._preempted)

    @property
    def longest_waiting(self) -> Generation | None:
        """The request that came first of those that were never admitted, or None."""
        return next(iter(self._oldest_first), None)

    def add(self, generation: Generation) -> None:
        """Add a new request.

        Raises:
            QueueFull: as many requests wait as may.
        """
        if self._limit is not None and len(self._oldest_first) >= self._limit:
            raise QueueFull(
                f"request '{generation.request.id}' is not taken: {self._limit} requests wait, as many as "
                "may (max_waiting). Send it again later."
            )
        length = generation.end if self._shortest_first else 0
        self._oldest_first[generation] = None
        heapq.heappush(self._turns, (generation.request.priority, length, next(self._numbers), generation))

    def put_back(self, generation: Generation) -> None:
        """Put a request that has lost its blocks before all others."""
        self._preempted.appendleft(generation)

    def head(self) -> Generation:
        """Return the request whose turn it is. The queue is not empty."""
        if self._preempted:
            return self._preempted[0]
        if self._num_overtakes >= MAX_OVERTAKES:
            return next(iter(self._oldest_first))
        while self._turns[0][-1] not in self._oldest_first:
            heapq.heappop(self._turns)
        return self._turns[0][-1]

    def take(self) -> Generation:
        """Remove and return the request whose turn it is."""
        generation = self.head()
        if not self._preempted and generation is not self.longest_waiting:
            self._num_overtakes += 1
        self.remove(generation)
        return generation

    def remove(self, generation: Generation) -> None:
        """Remove a request, wherever it is."""
        if generation not in self._oldest_first:
            self._preempted.remove(generation)
            return
        if generation is self.longest_waiting:
            self._num_overtakes = 0
        del self._oldest_first[generation]
