"""The queue before the engine: clients take turns, so that one with many requests does not delay the others.

The next request is one of the client that has the fewest running, and among equals of the client whose last
turn was longest ago. A client's own requests are ordered by priority, then by arrival. How many may wait is
shared between clients as `shares.py` describes.
"""

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from compress.errors import QueueFull
from compress.serve.shares import Shares


class Queued(Protocol):
    """One request of a client; a lower `priority` comes first."""

    @property
    def client(self) -> str: ...
    @property
    def priority(self) -> int: ...


T = TypeVar("T", bound=Queued)


class FairQueue(Generic[T]):
    """Requests that wait, by client, and how many of each client run.

    A request that was taken counts as running until `release`. Nothing is kept of a client that has no
    request here. It is used by one thread at a time.
    """

    def __init__(self, max_waiting: int) -> None:
        self._shares = Shares(max_waiting)
        self._waiting: dict[str, list[tuple[int, int, T]]] = {}
        self._running: Counter[str] = Counter()
        self._last_turn: dict[str, int] = {}
        self._num_turns = 0
        self._num_added = 0

    def __len__(self) -> int:
        return self._shares.total

    def add(self, items: Sequence[T]) -> None:
        """Append requests of one client, all of them or none.

        Raises:
            QueueFull: the client's share of the queue does not hold them.
        """
        if not items:
            return
        client = items[0].client
        if not self._shares.take(client, len(items)):
            raise QueueFull(
                f"{len(self)} requests wait already, and there is no place for {len(items)} more of this "
                "client; try again later."
            )
        for item in items:
            self._num_added += 1
            insort(self._waiting.setdefault(client, []), (item.priority, self._num_added, item))

    def take(self) -> T | None:
        """Return the request whose turn it is, or None where none waits."""
        if not self._waiting:
            return None
        client = min(self._waiting, key=lambda each: (self._running[each], self._last_turn.get(each, 0)))
        _, _, item = self._waiting[client].pop(0)
        self._forget_waiting(client, 1)
        self._running[client] += 1
        self._num_turns += 1
        self._last_turn[client] = self._num_turns
        return item

    def remove(self, item: T) -> bool:
        """Remove a request that waits; return whether it did."""
        waiting = self._waiting.get(item.client, [])
        place = next((idx for idx, (_, _, each) in enumerate(waiting) if each is item), None)
        if place is None:
            return False
        del waiting[place]
        self._forget_waiting(item.client, 1)
        self._forget(item.client)
        return True

    def release(self, client: str) -> None:
        """Count one running request of a client as ended."""
        self._running[client] -= 1
        self._forget(client)

    def drain(self) -> list[T]:
        """Remove all requests that wait, and return them."""
        items = [item for waiting in self._waiting.values() for _, _, item in waiting]
        for item in items:
            self.remove(item)
        return items

    def _forget_waiting(self, client: str, num: int) -> None:
        self._shares.give_back(client, num)
        if not self._waiting[client]:
            del self._waiting[client]

    def _forget(self, client: str) -> None:
        if self._running[client] <= 0:
            del self._running[client]
            if client not in self._waiting:
                self._last_turn.pop(client, None)
