"""Child processes: places, messages, signals, and how they end when one fails or their parent is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from compress.cli import children
from compress.cli.children import Ended, Order, Stop, run_children, stop_on_signals
from compress.pipeline import visible_gpus

ONE_PLACE: list[Mapping[str, str]] = [{}]
PRELUDE = "import os, signal, sys, time\nfrom pathlib import Path\n"
WAITS = PRELUDE + "print('ready', file=sys.stderr, flush=True)\ntime.sleep(60)"
"""A child that ends by a signal only."""


def order(name: str, code: str) -> Order:
    return Order(name, [sys.executable, "-S", "-c", code])


def codes(ended: list[Ended]) -> list[int | None]:
    return [each.exit_code for each in ended]


def run(orders: list[Order], places: list[Mapping[str, str]] = ONE_PLACE, **options: Any) -> list[Ended]:
    return run_children(orders, **{"places": places, "show": lambda line: None, "stop": Stop(), **options})


def when_ready(count: int, act: Callable[[], None]) -> Callable[[str], None]:
    """Return a `show` that acts once, when so many children have written that they are ready."""
    seen: list[str] = []

    def show(line: str) -> None:
        if line.endswith("ready"):
            seen.append(line)
            if len(seen) == count:
                act()

    return show


def test_results_come_in_the_order_given_with_what_each_printed() -> None:
    orders = [order(f"n{idx}", f"import sys; print({idx} * 3); sys.exit({idx})") for idx in range(3)]
    ended = run(orders, [{}, {}])
    assert codes(ended) == [0, 1, 2]
    assert [each.stdout for each in ended] == ["0\n", "3\n", "6\n"]


def test_no_two_children_are_in_one_place_at_a_time(tmp_path: Path) -> None:
    code = (
        PRELUDE
        + f"""
held = Path({str(tmp_path)!r}) / os.environ["CUDA_VISIBLE_DEVICES"]
held.mkdir()          # fails where another child is in this place
time.sleep(0.1)
held.rmdir()
print(held.name)
"""
    )
    places: list[Mapping[str, str]] = [{"CUDA_VISIBLE_DEVICES": name} for name in ("GPU-1a", "MIG-2b")]
    ended = run([order(f"n{idx}", code) for idx in range(6)], places)
    assert codes(ended) == [0] * 6
    assert {each.stdout.strip() for each in ended} == {"GPU-1a", "MIG-2b"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["0", "1", "2"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1a2b, GPU-3c,MIG-4"}, ["GPU-1a2b", "GPU-3c", "MIG-4"]),
        ({"CUDA_VISIBLE_DEVICES": "5,3,2,-1,7"}, ["5", "3", "2"]),
    ],
)
def test_gpus_keep_the_names_that_this_process_was_given(given: dict[str, str], expected: list[str]) -> None:
    assert visible_gpus(3, given) == expected


def test_messages_are_shown_by_whole_lines_under_the_name_of_the_child() -> None:
    code = (
        PRELUDE
        + "sys.stderr.write('one\\ntw'); sys.stderr.flush(); time.sleep(0.05); sys.stderr.write('o\\nend')"
    )
    lines: list[str] = []
    run([order("a", code), order("b", code)], [{}, {}], show=lines.append)
    for name in "ab":
        own = [line for line in lines if line.startswith(f"[{name}]")]
        assert own == [f"[{name}] one", f"[{name}] two", f"[{name}] end"]


def test_a_child_that_fails_stops_nobody_else_unless_that_is_asked_for() -> None:
    orders = [order("bad", "raise SystemExit(3)"), order("good", "pass")]
    assert codes(run(orders)) == [3, 0]
    assert codes(run(orders, goes_on=lambda code: code == 0)) == [3, None]


def test_failing_fast_also_stops_those_that_run() -> None:
    fails = PRELUDE + "sys.stdin.read(); time.sleep(0.3); sys.exit(5)"
    ended = run([order("a", WAITS), order("b", fails)], [{}, {}], goes_on=lambda code: False)
    assert codes(ended) == [143, 5]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_all_children_once_and_nobody_starts_after_it(number: signal.Signals) -> None:
    code = (
        PRELUDE
        + """
seen = []
for each in (signal.SIGTERM, signal.SIGINT):
    signal.signal(each, lambda number, frame: seen.append(number))
print("ready", file=sys.stderr, flush=True)
while not seen:
    time.sleep(0.01)
time.sleep(0.2)      # a run goes on to its next boundary
print(seen)
"""
    )
    with stop_on_signals() as stop:
        show = when_ready(2, lambda: os.kill(os.getpid(), number))
        ended = run([order(f"n{idx}", code) for idx in range(3)], [{}, {}], show=show, stop=stop)
    assert codes(ended) == [0, 0, None]
    assert [each.stdout for each in ended[:2]] == [f"[{int(number)}]\n"] * 2
    assert stop.received == [number]


def test_a_second_signal_stops_at_once_and_kills_who_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "GRACE_S", 0.3)
    polite = (
        PRELUDE
        + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", file=sys.stderr, flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(130)
"""
    )
    deaf = polite.replace("signal.SIGTERM, signal.SIG_IGN)", "signal.SIGTERM, signal.SIG_IGN)\n"
                          "signal.signal(signal.SIGINT, signal.SIG_IGN)")  # fmt: skip

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    with stop_on_signals() as stop:
        ended = run([order("a", polite), order("b", deaf)], [{}, {}], show=when_ready(2, twice), stop=stop)
    assert codes(ended) == [130, 137]


def test_a_sigterm_sent_to_the_process_and_to_its_group_is_one_request() -> None:
    stop = Stop()
    stop.remember(signal.SIGTERM, None)
    stop.remember(signal.SIGTERM, None)
    assert stop.received == [signal.SIGTERM]
    stop.times_s[-1] -= 2.0
    stop.remember(signal.SIGTERM, None)
    assert len(stop.received) == 2


def test_children_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        PRELUDE
        + f"""
def ended(number, frame):
    Path({str(tmp_path / "ended")!r}).write_text(str(number))
    sys.exit(0)
signal.signal(signal.SIGTERM, ended)
Path({str(tmp_path / "ready")!r}).touch()
time.sleep(60)
"""
    )
    parent = (
        "import sys\nfrom compress.cli.children import *\n"
        f"orders = [Order('a', [sys.executable, '-S', '-c', {code!r}])]\n"
        "run_children(orders, places=[{}], show=print, stop=Stop())"
    )
    process = subprocess.Popen([sys.executable, "-c", parent])
    _wait_for(tmp_path / "ready")
    process.kill()
    process.wait()
    _wait_for(tmp_path / "ended")
    assert (tmp_path / "ended").read_text() in ("", str(int(signal.SIGTERM)))


def _wait_for(path: Path) -> None:
    until_s = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until_s, path
        time.sleep(0.01)
