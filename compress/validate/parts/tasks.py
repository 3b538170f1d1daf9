"""The benchmarks that source and candidate answered: the recovery table and its verdicts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from compress.validate.display import Json, markdown_table, markdown_text, number, percent
from compress.validate.parts import PARTS, Part
from compress.validate.plots import CANDIDATE, DASHED, FLOOR, INK, new_figure, style, svg
from compress.validate.tasks.compare import TaskRow
from compress.validate.tasks.task import ERROR

HEAD = ("task", "items", "source", "this model", "recovery", "drop, points", "verdict")


@PARTS.register("tasks")
@dataclass(frozen=True)
class TasksPart(Part):
    """One row a task."""

    page_order: ClassVar[int] = 22
    rows: Sequence[TaskRow] = ()

    def as_json(self) -> Json:
        """Return the rows and the confidence of their intervals."""
        if not self.rows:
            return {}
        return {"tasks": {"confidence": 1 - ERROR, "rows": [row.as_json() for row in self.rows]}}

    @staticmethod
    def values(report: Json) -> Json:
        """Return functions that write a row's cells, for the template."""
        del report
        return {"points": points, "drop_text": drop_text, "tells": tells}

    @staticmethod
    def plots(report: Json) -> dict[str, str]:
        """Return the drops with their intervals, as a picture."""
        return {"tasks": drops_plot(report["tasks"]["rows"])} if "tasks" in report else {}

    @staticmethod
    def sentence(report: Json) -> str:
        """Return which tasks it does worse."""
        rows = report.get("tasks", {}).get("rows", [])
        worse = [markdown_text(row["name"]) for row in rows if row["verdict"] == "worse"]
        return f"It does worse than its source in {', '.join(worse)}." if worse else ""

    @staticmethod
    def card(report: Json) -> list[str]:
        """Return the recovery table and how to read it."""
        if "tasks" not in report:
            return []
        found = report["tasks"]
        note = (
            f"Both models answered the same items; the drop has its {percent(found['confidence'], 0)} "
            "interval, and "
            "verdicts are at 5 % over all tasks side by side (exact McNemar test, Holm). "
            + " ".join(tells(row) for row in found["rows"])
        )
        return ["## Tasks", recovery_table(found["rows"]), markdown_text(note)]


def recovery_table(rows: Sequence[Json]) -> str:
    """Return the table of the model card."""
    body = [
        [
            f"{markdown_text(row['name'])} ({row['metric'].replace('_', ' ')})",
            items_text(row),
            percent(row["source"]),
            percent(row["candidate"]),
            "–" if row["recovery"] is None else percent(row["recovery"]),
            drop_text(row),
            row["verdict"],
        ]
        for row in rows
    ]
    return markdown_table(HEAD, body)


def items_text(row: Json) -> str:
    """Return how many items were answered, and of how many."""
    whole = row["num_items"] == row["num_available"]
    return number(row["num_items"]) + ("" if whole else f" of {number(row['num_available'])}")


def points(value: float) -> str:
    """Return a share as percentage points with a sign, the minus of a number."""
    shown = f"{abs(value) * 100:.2f}"
    return shown if float(shown) == 0 else f"{'−' if value < 0 else '+'}{shown}"


def drop_text(row: Json) -> str:
    """Return the drop in points with its interval."""
    drop = row["drop"]
    return f"{points(drop['value'])} [{points(drop['lower'])}, {points(drop['upper'])}]"


def tells(row: Json) -> str:
    """Return what the items of a task can tell, as a sentence."""
    stopped = "It stopped as soon as its verdict was certain. " if _stopped(row) else ""
    return (
        f"{row['name']}: {stopped}{number(row['num_items'])} items show a drop of "
        f"{row['detectable_drop'] * 100:.1f} points four times in five; one of "
        f"{row['margin'] * 100:g} would need {number(row['items_needed'])} items."
    )


def _stopped(row: Json) -> bool:
    return bool(row["sequential"] and row["num_items"] < row["num_available"])


def drops_plot(rows: Sequence[dict[str, Any]]) -> str:
    """Return the drop of each task with its interval, and its margin as a line of its own."""
    with style():
        figure, axes = new_figure(height=0.7 + 0.34 * len(rows))
        for place, row in enumerate(rows):
            drop = {name: value * 100 for name, value in row["drop"].items()}
            axes.plot([drop["lower"], drop["upper"]], [place, place], color=CANDIDATE, linewidth=1.8)
            axes.plot(drop["value"], place, "o", color=CANDIDATE, markersize=5)
            margin = row["margin"] * 100
            axes.plot(
                [margin, margin], [place - 0.35, place + 0.35], color=FLOOR, linewidth=1.4, linestyle=DASHED
            )
        axes.axvline(0, color=INK, linewidth=0.9)
        axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(axis="x")
        axes.set_xlabel("drop of accuracy, points (to the right: worse)")
        return svg(figure, name="tasks")
