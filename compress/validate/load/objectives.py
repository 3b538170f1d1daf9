"""Objectives: limits in milliseconds that a request must keep to count as good.

    ttft:200 tpot:50 e2el:5000        the spelling of `vllm bench serve --goodput`

Goodput is the number of requests a second that completed and kept every limit. A request of one token has no
TPOT and keeps any limit of it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compress.errors import UsageError, did_you_mean
from compress.validate.load.served import ServedRequest

OBJECTIVES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Objectives:
    """Limits in ms; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @property
    def limits(self) -> dict[str, float]:
        """The limits that there are, by name."""
        values = {name: getattr(self, name) for name in OBJECTIVES}
        return {name: value for name, value in values.items() if value is not None}

    def holds(self, served: ServedRequest) -> bool:
        """Return whether a request completed within all limits."""
        times_ms = request_times_ms(served)
        return not served.error and all(
            times_ms[name] is None or times_ms[name] <= limit  # type: ignore[operator]
            for name, limit in self.limits.items()
        )


def request_times_ms(served: ServedRequest) -> dict[str, float | None]:
    """Return TTFT, TPOT and end-to-end latency of one request; None for what it does not have."""
    times_s = served.token_times_s
    if not times_s:
        return dict.fromkeys(OBJECTIVES, None)
    rest_s = times_s[-1] - times_s[0]
    return {
        "ttft": (times_s[0] - served.arrival_s) * 1e3,
        "tpot": rest_s / (len(times_s) - 1) * 1e3 if len(times_s) > 1 else None,
        "e2el": (times_s[-1] - served.arrival_s) * 1e3,
    }


def parse_objectives(texts: Sequence[str]) -> Objectives:
    """Return the objectives of `name:milliseconds` texts; one text may hold several, apart by spaces or
    commas.

    Raises:
        UsageError: an unknown name, a name twice, or a limit that is not a positive number.
    """
    limits: dict[str, float] = {}
    for each in (word for text in texts for word in text.replace(",", " ").split()):
        name, _, value = each.partition(":")
        if name not in OBJECTIVES:
            raise UsageError(
                f"goodput '{each}': unknown objective '{name}'.{did_you_mean(name, OBJECTIVES)} Write it as "
                "ttft:200, in milliseconds."
            )
        if name in limits:
            raise UsageError(f"goodput '{each}': {name} has a limit already; leave one of them out.")
        limits[name] = _limit(each, value)
    return Objectives(**limits)


def _limit(text: str, value: str) -> float:
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise UsageError(f"goodput '{text}': the limit must be a positive number of milliseconds.")
    return limit


def objectives_of(limits: Mapping[str, float]) -> Objectives:
    """Return the objectives of a mapping of limits, such as a recipe has.

    Raises:
        UsageError: as `parse_objectives`.
    """
    return parse_objectives([f"{name}:{value}" for name, value in limits.items()])
