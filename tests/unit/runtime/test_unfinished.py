"""Requests that have not finished: ids that are used again, and their deadlines."""

import pytest

from compress.errors import UsageError
from compress.runtime.generation import Generation
from compress.runtime.request import Request, SamplingParams
from compress.runtime.unfinished import Unfinished


def generation(request_id: str, deadline_s: float | None) -> Generation:
    request = Request(request_id, (1, 2), SamplingParams(max_tokens=3), deadline_s=deadline_s)
    return Generation(request, 0.0, list(request.prompt))


def test_deadlines_pass_once_and_in_order() -> None:
    unfinished = Unfinished()
    late, early, never = generation("a", 5.0), generation("b", 2.0), generation("c", None)
    for each in (late, early, never):
        unfinished.add(each)
    assert unfinished.overdue(1.9) == []
    assert unfinished.overdue(5.0) == [early, late]
    assert unfinished.overdue(9.0) == []
    assert len(unfinished) == 3


@pytest.mark.parametrize(
    ("again_s", "at_s", "passes"), [(8.0, 5.0, False), (8.0, 8.0, True), (5.0, 5.0, True)]
)
def test_an_id_that_is_used_again_has_the_deadline_of_its_last_request(
    again_s: float, at_s: float, passes: bool
) -> None:
    unfinished = Unfinished()
    first, second = generation("a", 5.0), generation("a", again_s)
    unfinished.add(first)
    unfinished.remove(first)
    unfinished.add(second)
    assert unfinished.overdue(at_s) == [second] * passes


def test_ids_in_use_are_refused_and_unknown_ones_not_found() -> None:
    unfinished = Unfinished()
    unfinished.add(generation("a", None))
    with pytest.raises(UsageError, match="request id 'a' is in use by an unfinished request"):
        unfinished.check_unused("a")
    unfinished.check_unused("b")
    with pytest.raises(UsageError, match="no unfinished request has the id 'b'"):
        unfinished.find("b")
