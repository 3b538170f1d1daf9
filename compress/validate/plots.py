"""The report's figures as inline SVG: matplotlib's SVG backend through `Figure` objects, no pyplot state, the same bytes for the same data.

One palette on every figure: grey is the source (or before), blue the candidate (or after), amber the hardware's floor and markers.
Text stays text (the page's own font, searchable); ids that nothing refers to are dropped, and the rest are salted per figure so that two
figures on one page do not share clip paths.
"""

import io
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

Row = Mapping[str, Any]

SOURCE = "#a8b1bc"
CANDIDATE = "#2f6f9f"
FLOOR = "#c98a1b"
INK = "#3a4450"
FAINT = "#e3e7ec"
_KINDS = ("#2f6f9f", "#6fa3c7", "#b9d2e4", "#8f9aa7", "#c9cfd6", "#dfe3e8")
_WIDTH = 8.6  # inches; the page scales it
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#c3cad2",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 9.5,
    "xtick.color": "#6b7683",
    "ytick.color": "#6b7683",
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
}


def kl_plot(accuracy: Row) -> str:
    """Share of tokens in each bin of KL (log axis), with the mean and the tail marked."""
    edges = accuracy["kl_bin_edges"]
    counts = accuracy["kl_bin_counts"]
    shares = [count / accuracy["num_tokens"] * 100 for count in counts]
    used = [index for index, count in enumerate(counts) if count]
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(height=2.5)
        axes.stairs(shares, edges, fill=True, color=CANDIDATE, alpha=0.85)
        axes.set_xscale("log")
        axes.set_xlim(edges[max(used[0] - 1, 0)], edges[min(used[-1] + 2, len(edges) - 1)])
        axes.set_ylim(0, max(shares) * 1.3)
        axes.grid(axis="y")
        marks = (
            ("median", accuracy["kl_p50"]["value"]),
            ("mean", accuracy["kl_mean"]["value"]),
            ("p99", accuracy["kl_p99"]["value"]),
        )
        for rank, (name, value) in enumerate((*marks, ("p99.9", accuracy["kl_p999"]["value"]))):
            side = -1 if rank % 2 == 0 else 1
            if value > edges[0]:
                axes.axvline(
                    value,
                    color=FLOOR if name == "mean" else INK,
                    linewidth=1.1,
                    linestyle="-" if name == "mean" else (0, (3, 3)),
                )
                axes.annotate(
                    f"{name} {value:.2g}",
                    (value, 0.97 - 0.115 * (rank // 2)),
                    xycoords=("data", "axes fraction"),
                    xytext=(5 * side, 0),
                    textcoords="offset points",
                    ha="left" if side > 0 else "right",
                    va="top",
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2},
                )
        axes.set_xlabel("KL(source ‖ candidate) of one token, nats")
        axes.set_ylabel("tokens, %")
        return _svg(figure, salt="kl")


def latency_plot(latency: Mapping[str, Sequence[Row]]) -> str:
    """Median TPOT a batch size, whiskers to p95, and the candidate's floor."""
    sides = [
        (name, latency[name], color)
        for name, color in (("source", SOURCE), ("candidate", CANDIDATE))
        if name in latency
    ]
    sizes = [row["batch_size"] for row in latency["candidate"]]
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(height=0.75 + 0.52 * len(sizes))
        thickness = 0.74 / len(sides)
        for offset, (name, rows, color) in enumerate(sides):
            for index, row in enumerate(rows):
                if row["batch_size"] not in sizes:
                    continue
                y = sizes.index(row["batch_size"]) + (offset - (len(sides) - 1) / 2) * thickness
                median = row["tpot_ms_p50"]
                p95 = row["tpot_ms_p95"]
                floor = row["floor_ms"]
                axes.barh(y, median, height=thickness * 0.9, color=color, label=name if index == 0 else None)
                axes.plot(
                    [median, p95],
                    [y, y],
                    color=INK,
                    linewidth=1.0,
                    label="to p95" if index == offset == 0 else None,
                )
                axes.plot(
                    [floor, floor],
                    [y - thickness * 0.45, y + thickness * 0.45],
                    color=FLOOR,
                    linewidth=2.4,
                    solid_capstyle="butt",
                    label="floor" if index == offset == 0 else None,
                )
                axes.annotate(
                    f"{median:#.3g}".rstrip("."),
                    (p95, y),
                    xytext=(5, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8.5,
                )
        axes.set_yticks(range(len(sizes)), [f"batch {size}" for size in sizes])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_xlim(left=0)
        axes.grid(axis="x")
        axes.set_xlabel("time per output token, ms")
        handles, labels = axes.get_legend_handles_labels()
        order = sorted(
            range(len(labels)),
            key=lambda index: ("source", "candidate", "floor", "to p95").index(labels[index]),
        )
        legend = {"loc": "outside upper left", "ncols": 4, "handlelength": 1.4, "columnspacing": 1.6}
        figure.legend([handles[index] for index in order], [labels[index] for index in order], **legend)
        return _svg(figure, salt="latency")


def layer_error_plot(layers: Sequence[Row]) -> str:
    """One small panel a kind of linear (experts averaged), error over depth, before and after, one common log axis."""
    panels = _by_kind(layers)
    num_columns = min(4, len(panels))
    num_rows = -(-len(panels) // num_columns)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, 0.55 + 1.45 * num_rows), layout="constrained")
        grid = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
        positive = any(row[key] > 0 for row in layers for key in ("error_before", "error_after"))
        for index, axes in enumerate(grid.flat):
            if index >= len(panels):
                axes.set_visible(False)
                continue
            kind, points = panels[index]
            depth = [layer for layer, _, _ in points]
            axes.plot(
                depth,
                [before for _, before, _ in points],
                color=SOURCE,
                linewidth=1.3,
                label="before" if index == 0 else None,
                **_dots(points),
            )
            axes.plot(
                depth,
                [after for _, _, after in points],
                color=CANDIDATE,
                linewidth=1.6,
                label="after" if index == 0 else None,
                **_dots(points),
            )
            axes.set_title(kind, loc="left", fontweight="bold")
            axes.grid(axis="y")
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            axes.tick_params(labelbottom=index + num_columns >= len(panels))
            if positive:
                axes.set_yscale("log")
                axes.yaxis.set_minor_locator(NullLocator())
        figure.supxlabel("layer", fontsize=9.5)
        figure.supylabel("output error", fontsize=9.5)
        figure.legend(loc="outside upper right", ncols=2, handlelength=1.4)
        return _svg(figure, salt="layers")


def size_plot(sizes: Sequence[Row]) -> str:
    """Bytes of source and candidate, stacked by kind of tensor."""
    totals = [sum(row[f"{side}_bytes"] for row in sizes) for side in ("source", "candidate")]
    unit, scale = ("GB", 1e9) if max(totals) >= 1e9 else ("MB", 1e6)
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(height=1.55)
        starts = [0.0, 0.0]
        for index, row in enumerate(sizes):
            widths = [row["source_bytes"] / scale, row["candidate_bytes"] / scale]
            axes.barh(
                [0, 1],
                widths,
                left=starts,
                height=0.66,
                color=_KINDS[index % len(_KINDS)],
                edgecolor="white",
                linewidth=0.8,
                label=row["kind"],
            )
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        for y, total in enumerate(starts):
            axes.annotate(
                f"{total:#.3g}".rstrip(".") + f" {unit}",
                (total, y),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontweight="bold",
            )
        axes.set_yticks([0, 1], ["source", "candidate"])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.grid(axis="x")
        axes.set_xlabel(unit)
        figure.legend(
            loc="outside upper left", ncols=6, handlelength=1.0, handleheight=1.0, columnspacing=1.6
        )
        return _svg(figure, salt="size")


def mixed_plot(mixed: Row) -> str:
    """Predicted KL over cost: the frontier, each scheme for all, the budget and what was chosen."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(height=2.9)
        lossy = [each for each in mixed["frontier"] if each["kl"] > 0]
        axes.plot(
            [each["cost"] * 100 for each in lossy],
            [each["kl"] for each in lossy],
            color=SOURCE,
            linewidth=1.4,
            label="best mixes",
        )
        axes.axvline(mixed["limit"] * 100, color=FLOOR, linewidth=1.1, linestyle=(0, (3, 3)), label="budget")
        for index, (name, each) in enumerate(
            (name, each) for name, each in mixed["uniform"].items() if each["kl"] > 0
        ):
            at = (each["cost"] * 100, each["kl"])
            axes.plot(*at, "o", color=INK, markersize=4.5, label="one scheme for all" if index == 0 else None)
            axes.annotate(name, at, xytext=(6, 3), textcoords="offset points", fontsize=8.5)
        if mixed["chosen"]["kl"] > 0:
            axes.plot(
                mixed["chosen"]["cost"] * 100,
                mixed["chosen"]["kl"],
                "D",
                color=CANDIDATE,
                markersize=7,
                label="chosen",
            )
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.margins(x=0.1, y=0.12)
        axes.grid()
        axes.set_xlabel(f"{mixed['cost']} of the layers' linears, % of 16 bits")
        axes.set_ylabel("predicted KL, nats a token")
        figure.legend(loc="outside upper left", ncols=4, handlelength=1.4, columnspacing=1.6)
        return _svg(figure, salt="mixed")


def _figure(*, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _dots(points: Sequence[object]) -> dict[str, Any]:
    """A line of one or two points is not seen without them."""
    return {"marker": "o", "markersize": 3.0 if len(points) > 12 else 4.0}


def _by_kind(layers: Sequence[Row]) -> list[tuple[str, list[tuple[int, float, float]]]]:
    """(kind, [(layer, mean error before, mean error after)]) in order of first appearance; `moe.experts.3.gate` is of kind `gate`."""
    groups: dict[str, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in layers:
        groups[str(row["linear"]).rpartition(".")[2]][int(row["layer"])].append(row)
    return [
        (
            kind,
            [
                (layer, _mean(rows, "error_before"), _mean(rows, "error_after"))
                for layer, rows in sorted(by_layer.items())
            ],
        )
        for kind, by_layer in groups.items()
    ]


def _mean(rows: Sequence[Row], key: str) -> float:
    return float(sum(row[key] for row in rows) / len(rows))


def _svg(figure: Figure, *, salt: str) -> str:
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        FigureCanvasSVG(figure).print_svg(
            stream, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text)
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return text.replace("<svg ", f'<svg role="img" class="plot {salt}" ', 1).strip()
