"""The pictures of a sweep: times, throughput and goodput against the load, and the use of the cache over
time.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from compress.validate.plots import CANDIDATE, SHADES, SOURCE, Row, dots, new_grid, style, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASHES = (0, (3, 2))
_APART = (0, 2, 3, 1, 4)
"""The order in which targets take the shades: neighbours differ most."""
_TIMES = (("ttft", "time to first token"), ("itl", "gap between tokens"))


def load_value(row: Row) -> float:
    """Return where a row is on the axis of loads: its rate, else its number of clients; NaN for a load that
    has neither.
    """
    if isinstance(row["request_rate"], int | float):
        return float(row["request_rate"])
    return math.nan if row["max_concurrency"] is None else float(row["max_concurrency"])


def sweep_plot(rows: Sequence[Row]) -> str:
    """Return four pictures: TTFT and ITL at the median and p99, requests a second served and good, all
    against the load, and latency against throughput.
    """
    by_rate = all(isinstance(row["request_rate"], int | float) for row in rows)
    label = "requests a second that arrive" if by_rate else "clients"
    names = list(dict.fromkeys(row["target"] for row in rows))
    with style():
        figure, (ttft, itl, served, traded) = new_grid(2, 2, height=5.4)
        for color, name in zip(_cycle(len(names)), names, strict=True):
            own = sorted((row for row in rows if row["target"] == name), key=load_value)
            prefix = f"{name}, " if len(names) > 1 else ""
            for axes, (key, title) in zip((ttft, itl), _TIMES, strict=True):
                _times(axes, own, key, color=color, name=prefix)
                axes.set_ylabel(f"{title}, ms")
            _served(served, own, color=color, name=prefix)
            traded.plot(
                [row["output_throughput"] for row in own],
                [row["median_itl_ms"] for row in own],
                color=color,
                label=name,
                **dots(own),
            )
        for axes in (ttft, itl, served):
            axes.set_xlabel(label)
        served.set_ylabel("requests a second")
        traded.set_xlabel("output tokens a second")
        traded.set_ylabel("median gap, ms")
        for axes in (ttft, itl, served, traded):
            axes.grid(axis="y")
            axes.set_ylim(bottom=0)
            axes.set_xlim(left=0)
        found: dict[str, Any] = {}
        for axes in (ttft, served):
            found |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        figure.legend(
            found.values(),
            found.keys(),
            loc="outside upper left",
            ncols=3,
            handlelength=2.0,
            columnspacing=1.6,
        )
        return svg(figure, name="sweep")


def bars_plot(rows: Sequence[Row]) -> str:
    """Return bars of the targets under one load: TTFT and ITL from the median to p99, and output tokens a
    second. Targets named source and candidate have the colours that they have in every picture of a report.
    """
    names = [row["target"] for row in rows]
    own = {"source": SOURCE, "candidate": CANDIDATE}
    colors = [own.get(name, color) for name, color in zip(names, _cycle(len(rows)), strict=True)]
    with style():
        figure, (ttft, itl, tokens) = new_grid(1, 3, height=0.9 + 0.42 * len(rows))
        for axes, (key, title) in zip((ttft, itl), _TIMES, strict=True):
            for place, row in enumerate(rows):
                median = row[f"median_{key}_ms"]
                p99 = row[f"p99_{key}_ms"]
                color = colors[place]
                axes.barh(place, median, height=0.62, color=color)
                axes.plot([median, p99], [place, place], color=color, linewidth=1.0)
                axes.plot([p99], [place], marker="|", color=color)
            axes.set_xlabel(f"{title}, ms")
        for place, row in enumerate(rows):
            tokens.barh(place, row["output_throughput"], height=0.62, color=colors[place])
        tokens.set_xlabel("output tokens a second")
        for axes in (ttft, itl, tokens):
            axes.set_yticks(range(len(names)), names if axes is ttft else [""] * len(names))
            axes.tick_params(axis="y", length=0)
            axes.invert_yaxis()
            axes.set_xlim(left=0)
            axes.grid(axis="x")
        return svg(figure, name="bars")


def use_plot(series: Sequence[Row], *, name: str) -> str:
    """Return the share of the cache that is reserved and that is live, and the requests that run and wait,
    over the time of a run; no two pictures of a page share a `name`.
    """
    times_s = [row["time_s"] for row in series]
    with style():
        figure, (cache, queue) = new_grid(1, 2, height=2.2)
        for axes, keys in (
            (cache, (("reserved_frac", "reserved"), ("live_frac", "live"))),
            (queue, (("num_running", "running"), ("num_waiting", "waiting"))),
        ):
            for color, (key, words) in zip(SHADES[:2], keys, strict=True):
                values = [row[key] * (100 if axes is cache else 1) for row in series]
                axes.step(times_s, values, where="post", color=color, linewidth=1.2, label=words)
            axes.set_xlabel("seconds")
            axes.set_ylim(bottom=0)
            axes.grid(axis="y")
            axes.legend(loc="best", fontsize=8.5)
        cache.set_ylabel("of the cache, %")
        queue.set_ylabel("requests")
        return svg(figure, name=name)


def _times(axes: "Axes", rows: Sequence[Row], key: str, *, color: str, name: str) -> None:
    x = [load_value(row) for row in rows]
    lines: tuple[tuple[str, str, Any], ...] = (("median", "median", "-"), ("p99", "p99", _DASHES))
    for part, words, dash in lines:
        values = [row[f"{part}_{key}_ms"] for row in rows]
        axes.plot(x, values, color=color, linestyle=dash, label=f"{name}{words}", **dots(rows))


def _served(axes: "Axes", rows: Sequence[Row], *, color: str, name: str) -> None:
    x = [load_value(row) for row in rows]
    good = [row["request_goodput"] for row in rows]
    axes.plot(x, [row["request_throughput"] for row in rows], color=color, alpha=0.45, label=f"{name}served")
    if all(each is not None for each in good):
        axes.plot(x, good, color=color, linestyle=(0, (1, 1.2)), label=f"{name}good", **dots(rows))


def _cycle(num: int) -> list[str]:
    return [SHADES[_APART[idx % len(_APART)]] for idx in range(num)]
