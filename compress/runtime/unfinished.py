"""The requests of an engine that have not finished, by their ids, and their deadlines."""

import heapq
from collections.abc import Iterator

from compress.errors import UsageError
from compress.runtime.generation import Generation


class Unfinished:
    """The generations of an engine whose requests have not finished."""

    def __init__(self) -> None:
        self._generations: dict[str, Generation] = {}
        self._deadlines: list[tuple[float, str]] = []
        """A heap; those of requests that ended in time are dropped when they pass."""

    def __len__(self) -> int:
        return len(self._generations)

    def __iter__(self) -> Iterator[str]:
        return iter(self._generations)

    def check_unused(self, request_id: str) -> None:
        """Refuse an id that is in use.

        Raises:
            UsageError: an unfinished request has it.
        """
        if request_id in self._generations:
            raise UsageError(
                f"request id '{request_id}' is in use by an unfinished request; choose an id that is not."
            )

    def add(self, generation: Generation) -> None:
        """Note a generation, and the deadline of its request if it has one."""
        request = generation.request
        self._generations[request.id] = generation
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, request.id))

    def find(self, request_id: str) -> Generation:
        """Return the generation of a request.

        Raises:
            UsageError: no unfinished request has this id.
        """
        generation = self._generations.get(request_id)
        if generation is None:
            raise UsageError(f"no unfinished request has the id '{request_id}'.")
        return generation

    def remove(self, generation: Generation) -> None:
        """Forget a generation whose request has finished."""
        del self._generations[generation.request.id]

    def overdue(self, now_s: float) -> list[Generation]:
        """Return the generations whose deadlines have passed since the last call."""
        overdue: list[Generation] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, request_id = heapq.heappop(self._deadlines)
            generation = self._generations.get(request_id)
            if generation is None or generation in overdue:  # an id may have been used before
                continue
            if generation.request.deadline_s == deadline_s:
                overdue.append(generation)
        return overdue
