"""The report's pictures of speculation: which proposals are kept and what it saves; and how the draft learnt."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from compress.validate.plots import _STYLE, _WIDTH, CANDIDATE, FLOOR, INK, SOURCE, Row, _figure, _svg
from compress.validate.recovery_plot import _tokens

_SHADES = ("#2f6f9f", "#6fa3c7", "#c98a1b", "#8f9aa7", "#3a4450")


def speculation_plots(speculation: Mapping[str, Any]) -> dict[str, str]:
    draft = speculation.get("draft") or {}
    plots = {"speculation": speculation_plot(speculation["acceptance"], speculation["speed"])}
    if any("kl" in row for row in draft.get("curve", [])):
        plots["draft"] = draft_plot(draft["curve"])
    return plots


def speculation_plot(acceptance: Sequence[Row], speed: Sequence[Row]) -> str:
    """At the first temperature. Left: share of steps that keep the proposal of each position, the first proposer by category, the others
    over all. Right: speed-up by batch size, measured and predicted."""
    first = acceptance[0]["proposer"]
    temperature = acceptance[0]["temperature"]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, 2.7), layout="constrained")
        left, right = figure.subplots(1, 2)
        _acceptance(left, [row for row in acceptance if row["temperature"] == temperature], first)
        _speed(right, [row for row in speed if row["temperature"] == temperature], first)
        return _svg(figure, salt="speculation")


def _acceptance(axes: Axes, rows: Sequence[Row], first: str) -> None:
    own = [row for row in rows if row["proposer"] == first]
    shown = (own[1:] or own) + [
        row for row in rows if row["proposer"] != first and row["category"] == rows[0]["category"]
    ]
    for row, color in zip(shown, _SHADES * len(shown), strict=False):
        beside = row["proposer"] != first
        rates = [rate * 100 for rate in row["acceptance_rates"]]
        style: dict[str, Any] = {"color": SOURCE, "linestyle": (0, (3, 2))} if beside else {"color": color}
        label = row["proposer"] if beside else f"{first}, {row['category']}"
        axes.plot(
            range(1, len(rates) + 1), rates, marker="o", markersize=4, linewidth=1.6, label=label, **style
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, 100)
    axes.grid(axis="y")
    axes.set_xlabel("position of the proposed token")
    axes.set_ylabel("steps that keep it, %")
    axes.legend(loc="upper right", fontsize=8.5)


def _speed(axes: Axes, rows: Sequence[Row], first: str) -> None:
    sizes = sorted({row["batch_size"] for row in rows})
    for name in dict.fromkeys(row["proposer"] for row in rows):
        own = sorted((row for row in rows if row["proposer"] == name), key=lambda row: int(row["batch_size"]))
        places = [sizes.index(row["batch_size"]) for row in own]
        color = CANDIDATE if name == first else SOURCE
        axes.plot(
            places,
            [row["speedup"] for row in own],
            marker="o",
            markersize=4,
            linewidth=1.6,
            color=color,
            label=name,
        )
        axes.vlines(
            places,
            [row["speedup_lower"] for row in own],
            [row["speedup_upper"] for row in own],
            color=color,
            linewidth=1.1,
        )
        if all(row["predicted_speedup"] is not None for row in own):
            axes.plot(
                places,
                [row["predicted_speedup"] for row in own],
                "x",
                color=INK,
                markersize=6,
                label="predicted",
            )
    axes.axhline(1.0, color=FLOOR, linewidth=1.1, label="plain decoding")
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.margins(x=0.12, y=0.15)
    axes.grid(axis="y")
    axes.set_xlabel("batch size")
    axes.set_ylabel("times as fast")
    axes.legend(loc="best", fontsize=8.5)


def draft_plot(curve: Sequence[Row]) -> str:
    """Held-out KL to the target on the left axis; the acceptance length that follows from both distributions on the right one."""
    looks = [row for row in curve if "kl" in row]
    tokens = [row["tokens"] for row in looks]
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(height=2.5)
        axes.plot(
            tokens,
            [row["kl"] for row in looks],
            color=SOURCE,
            linewidth=1.6,
            marker="o",
            markersize=3,
            label="KL to the target",
        )
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tokens(value)))
        axes.set_xlabel("tokens of training")
        axes.set_ylabel("held-out KL, nats")
        axes.grid(axis="y")
        if all("acceptance_length" in row for row in looks):
            lengths = axes.twinx()
            values = [row["acceptance_length"] for row in looks]
            lengths.plot(
                tokens,
                values,
                color=CANDIDATE,
                linewidth=1.6,
                marker="o",
                markersize=3,
                label="expected acceptance length",
            )
            lengths.set_ylabel("tokens a step")
            lengths.spines["right"].set_visible(True)
        figure.legend(loc="outside upper left", ncols=2, handlelength=1.6)
        return _svg(figure, salt="draft")
