"""How fast source and candidate serve, against the floor of the hardware, and whether these times prove
anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from compress.validate.display import Json, markdown_table, markdown_text, number, percent
from compress.validate.latency import LatencyRow
from compress.validate.parts import PARTS, Part
from compress.validate.plots import CANDIDATE, FLOOR, INK, SOURCE, Row, new_figure, style, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AGAIN = "Measure again on a quiet machine, for a recipe with `compress run RECIPE --from validate`."


@PARTS.register("latency")
@dataclass(frozen=True)
class LatencyPart(Part):
    """One row a batch size of each model."""

    page_order: ClassVar[int] = 40
    source: Sequence[LatencyRow] = ()
    candidate: Sequence[LatencyRow] = ()

    @property
    def sides(self) -> Mapping[str, Sequence[LatencyRow]]:
        """The rows of each model that was timed."""
        return {name: rows for name, rows in (("source", self.source), ("candidate", self.candidate)) if rows}

    def as_json(self) -> Json:
        """Return the rows of each model."""
        return {"latency": {name: [row.as_json() for row in rows] for name, rows in self.sides.items()}}

    def warnings(self) -> list[str]:
        """Return one warning that names every row which proves nothing, with the reasons."""
        unstable = [
            f"{name}, batch {row.batch_size}: {_reasons(row)}"
            for name, rows in self.sides.items()
            for row in rows
            if row.unstable
        ]
        return (
            [f"Latency is unstable and proves nothing here ({'. '.join(unstable)}). {AGAIN}"]
            if unstable
            else []
        )

    @staticmethod
    def values(report: Json) -> Json:
        """Return whether any row is unstable, and whether the models were measured in turn."""
        rows = [row for rows in report.get("latency", {}).values() for row in rows]
        return {
            "any_unstable": any(row.get("unstable") for row in rows),
            "interleaved": any(row.get("interleaved") for row in rows),
            "uniform_routing": any(row.get("uniform_routing") for row in rows),
            "lost_frac": max((row.get("cpu_lost_frac") or 0.0 for row in rows), default=0.0),
        }

    @staticmethod
    def plots(report: Json) -> dict[str, str]:
        """Return the bars of time per token."""
        latency = report.get("latency", {})
        return {"latency": latency_plot(latency)} if "candidate" in latency else {}

    @staticmethod
    def card(report: Json) -> list[str]:
        """Return the table of latencies, the conditions, and a warning where they prove nothing."""
        latency = report.get("latency", {})
        if "candidate" not in latency:
            return []
        sources = {row["batch_size"]: row for row in latency.get("source", [])}
        rows = []
        for row in latency["candidate"]:
            source = sources.get(row["batch_size"])
            rows.append(
                [
                    str(row["batch_size"]),
                    number(row["ttft_ms_p50"]),
                    _time(source) if source else "–",
                    _time(row),
                    number(row["tpot_ms_p95"]),
                    _spread(row),
                    percent(row["floor_frac"], 0),
                ]
            )
        first = latency["candidate"][0]
        device = markdown_text(report.get("environment", {}).get("device", "this device"))
        turns = ", both models measured in turn" if first.get("interleaved") else ""
        note = (
            "Milliseconds: TTFT is the time to the first token, TPOT the time of each further one. "
            f"Bundled runtime on {device}, "
            f"{number(first['prompt_tokens'])} prompt and {number(first['output_tokens'])} output tokens, "
            f"{first['repeats']} repeats"
            f"{turns}, prefix cache {first['prefix_cache']}."
        )
        if any(row.get("uniform_routing") for rows in latency.values() for row in rows):
            note += " The floor of a mixture of experts assumes uniform routing."
        if any(row.get("unstable") for rows in latency.values() for row in rows):
            note += " **Times marked unstable prove nothing:** repeats disagree, or the processor was busy."
        head = [
            "batch",
            "TTFT p50",
            "TPOT p50, source",
            "TPOT p50",
            "TPOT p95",
            "spread of repeats",
            "share of the floor",
        ]
        return ["## Latency", markdown_table(head, rows), note]


def _reasons(row: LatencyRow) -> str:
    if row.tpot_instability:
        return row.tpot_instability
    return f"time to first token, {row.ttft_instability}"


def _time(row: Row) -> str:
    return number(row["tpot_ms_p50"]) + (" (unstable)" if row.get("unstable") else "")


def _spread(row: Row) -> str:
    return percent(row["tpot_spread_frac"], 0) if "tpot_spread_frac" in row else "–"


def latency_plot(latency: Mapping[str, Sequence[Row]]) -> str:
    """Return the median TPOT of each batch size with a line to p95, and the floor of each model."""
    sides = [
        (name, latency[name], color)
        for name, color in (("source", SOURCE), ("candidate", CANDIDATE))
        if name in latency
    ]
    sizes = [row["batch_size"] for row in latency["candidate"]]
    thickness = 0.74 / len(sides)
    with style():
        figure, axes = new_figure(height=0.75 + 0.52 * len(sizes))
        for offset, (name, rows, color) in enumerate(sides):
            shift = (offset - (len(sides) - 1) / 2) * thickness
            for row in rows:
                if row["batch_size"] in sizes:
                    place = sizes.index(row["batch_size"]) + shift
                    _bar(axes, row, place, thickness=thickness, color=color, name=name)
        axes.set_yticks(range(len(sizes)), [f"batch {size}" for size in sizes])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_xlim(left=0)
        axes.grid(axis="x")
        axes.set_xlabel("time per output token, ms")
        handles, labels = axes.get_legend_handles_labels()
        by_label = dict(zip(labels, handles, strict=True))
        shown = [each for each in ("source", "candidate", "floor", "to p95") if each in by_label]
        legend = {"loc": "outside upper left", "ncols": 4, "handlelength": 1.4, "columnspacing": 1.6}
        figure.legend([by_label[each] for each in shown], shown, **legend)
        return svg(figure, name="latency")


def _bar(axes: "Axes", row: Row, place: float, *, thickness: float, color: str, name: str) -> None:
    median = row["tpot_ms_p50"]
    p95 = row["tpot_ms_p95"]
    floor = row["floor_ms"]
    axes.barh(place, median, height=thickness * 0.9, color=color, label=name)
    axes.plot([median, p95], [place, place], color=INK, linewidth=1.0, label="to p95")
    axes.plot(
        [floor, floor],
        [place - thickness * 0.45, place + thickness * 0.45],
        color=FLOOR,
        linewidth=2.4,
        solid_capstyle="butt",
        label="floor",
    )
    shown = f"{median:#.3g}".rstrip(".")
    axes.annotate(
        f"{shown}, unstable" if row.get("unstable") else shown,
        (p95, place),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
    )
