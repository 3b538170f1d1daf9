"""Whose turn it is: priority, then age or length, with a bound on how often anybody is overtaken."""

import pytest

from compress.errors import QueueFull
from compress.runtime.generation import Generation
from compress.runtime.request import Request, SamplingParams
from compress.runtime.waiting_queue import MAX_OVERTAKES, WaitingQueue


def waiting(name: str, *, length: int = 4, priority: int = 0) -> Generation:
    request = Request(name, (1,) * length, SamplingParams(10), priority=priority)
    return Generation(request, 0.0, list(request.prompt))


def order(queue: WaitingQueue) -> list[str]:
    return [queue.take().request.id for _ in range(len(queue))]


def test_first_come_first_served_within_a_priority() -> None:
    queue = WaitingQueue()
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -3), ("e", 0)):
        queue.add(waiting(name, priority=priority))
    assert [each.request.id for each in queue] == ["a", "b", "c", "d", "e"]
    assert order(queue) == ["d", "b", "e", "a", "c"]


def test_the_shortest_first_where_that_is_asked_for() -> None:
    queue = WaitingQueue(shortest_first=True)
    for name, length in (("long", 90), ("short", 3), ("middle", 20), ("short too", 3)):
        queue.add(waiting(name, length=length))
    assert order(queue) == ["short", "short too", "middle", "long"]


def test_who_lost_its_blocks_is_next_whatever_its_priority() -> None:
    queue = WaitingQueue()
    queue.add(waiting("urgent", priority=-1))
    for name in ("admitted second", "admitted first"):  # the younger is preempted before the older
        queue.put_back(waiting(name, priority=5))
    assert queue.has_preempted
    assert order(queue) == ["admitted first", "admitted second", "urgent"]


def test_the_longest_waiting_is_overtaken_a_bounded_number_of_times() -> None:
    queue = WaitingQueue()
    queue.add(waiting("patient", priority=9))
    for idx in range(3 * MAX_OVERTAKES):
        queue.add(waiting(str(idx)))
    assert order(queue).index("patient") == MAX_OVERTAKES


def test_a_full_queue_refuses_by_name_and_takes_back_who_was_running() -> None:
    queue = WaitingQueue(limit=2)
    queue.add(waiting("a"))
    queue.add(waiting("b"))
    with pytest.raises(QueueFull, match=r"'c' is not taken: 2 requests wait.*again later"):
        queue.add(waiting("c"))
    queue.put_back(waiting("was running"))
    assert len(queue) == 3
    queue.take()
    assert queue.take().request.id == "a"
    queue.add(waiting("c"))
    assert order(queue) == ["b", "c"]


def test_who_leaves_is_skipped() -> None:
    queue = WaitingQueue()
    each = {name: waiting(name) for name in "abc"}
    for generation in each.values():
        queue.add(generation)
    queue.remove(each["a"])
    assert each["a"] not in queue
    assert each["b"] in queue
    assert queue.longest_waiting is each["b"]
    assert order(queue) == ["b", "c"]
    assert queue.longest_waiting is None
