"""Turns between clients and shares of what is limited."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import QueueFull
from compress.serve.fair_queue import FairQueue
from compress.serve.shares import Shares


@dataclass(eq=False)
class Item:
    client: str
    name: int = 0
    priority: int = 0


def taken(queue: FairQueue[Item], num: int) -> list[str]:
    found = [queue.take() for _ in range(num)]
    return ["-" if each is None else f"{each.client}{each.name}" for each in found]


def test_clients_take_turns_and_each_keeps_its_order() -> None:
    queue = FairQueue[Item](100)
    for idx in range(4):
        queue.add([Item("a", idx)])
    queue.add([Item("b", 0), Item("b", 1)])
    assert taken(queue, 7) == ["a0", "b0", "a1", "b1", "a2", "a3", "-"]


def test_the_client_with_the_fewest_running_requests_is_next() -> None:
    queue = FairQueue[Item](100)
    queue.add([Item("a", idx) for idx in range(5)])
    assert taken(queue, 3) == ["a0", "a1", "a2"]
    queue.add([Item("b", idx) for idx in range(4)])
    assert taken(queue, 3) == ["b0", "b1", "b2"]
    queue.release("a")
    queue.release("a")
    assert taken(queue, 2) == ["a3", "a4"]


def test_priority_orders_the_requests_of_one_client_only() -> None:
    queue = FairQueue[Item](100)
    queue.add([Item("a", 0), Item("a", 1, priority=-1)])
    queue.add([Item("b", 0, priority=-9)])
    assert taken(queue, 3) == ["a1", "b0", "a0"]


def test_a_client_never_fills_the_queue() -> None:
    queue = FairQueue[Item](10)
    for idx in range(5):
        queue.add([Item("a", idx)])
    with pytest.raises(QueueFull, match="5 requests wait"):
        queue.add([Item("a", 5)])
    for idx in range(3):
        queue.add([Item("b", idx)])
    with pytest.raises(QueueFull):
        queue.add([Item("b", 3)])
    queue.add([Item("c", 0)])
    assert len(queue) == 9


def test_items_come_in_whole_or_not_at_all() -> None:
    queue = FairQueue[Item](4)
    with pytest.raises(QueueFull):
        queue.add([Item("a", idx) for idx in range(5)])
    assert len(queue) == 0
    queue.add([Item("a", idx) for idx in range(4)])
    assert len(queue.drain()) == 4
    assert len(queue) == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["add", "take", "remove", "release"]))))
def test_nothing_is_lost_and_nothing_is_kept(steps: list[tuple[str, str]]) -> None:
    queue = FairQueue[Item](8)
    waiting: list[Item] = []
    running: list[Item] = []
    for client, what in steps:
        if what == "add":
            item = Item(client)
            try:
                queue.add([item])
                waiting.append(item)
            except QueueFull:
                assert waiting
        elif what == "take":
            item_or_none = queue.take()
            assert (item_or_none is None) == (not waiting)
            if item_or_none is not None:
                fewest = min(sum(r.client == w.client for r in running) for w in waiting)
                assert sum(r.client == item_or_none.client for r in running) == fewest
                waiting.remove(item_or_none)
                running.append(item_or_none)
        elif what == "remove" and waiting:
            assert queue.remove(waiting.pop())
        elif what == "release" and running:
            queue.release(running.pop().client)
        assert len(queue) == len(waiting)
    for each in list(waiting):
        assert queue.remove(each)
        assert not queue.remove(each)
    for each in running:
        queue.release(each.client)
    assert not queue._running
    assert not queue._waiting
    assert not queue._last_turn
    assert not queue._shares._held


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 5))))
def test_whoever_holds_nothing_gets_something_while_clients_are_few(asks: list[tuple[str, int]]) -> None:
    shares = Shares(100)
    for client, amount in asks:
        shares.take(client, amount)
    assert shares.total <= 100
    assert shares.take("new", 1)


def test_what_is_given_back_can_be_taken_again() -> None:
    shares = Shares(4)
    assert shares.take("a", 2)
    assert not shares.take("a", 1)
    shares.give_back("a", 2)
    assert shares.take("a", 4)
    assert not shares.take("b", 1)
