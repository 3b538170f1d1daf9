"""How source and candidate serve requests that arrive one by one: throughput, goodput, and times under
load.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from compress.validate.display import Json, markdown_table, number, percent
from compress.validate.load.compare import LoadRow
from compress.validate.load.page import load_text
from compress.validate.load.pictures import bars_plot, use_plot
from compress.validate.parts import PARTS, Part
from compress.validate.parts.latency import AGAIN


@PARTS.register("load")
@dataclass(frozen=True)
class LoadPart(Part):
    """One row a model, of the same requests."""

    page_order: ClassVar[int] = 45
    rows: Sequence[LoadRow] = ()

    def as_json(self) -> Json:
        """Return the rows, and samples of the candidate's engine over its first run."""
        if not self.rows:
            return {}
        rows = [{name: value for name, value in row.as_json().items() if name != "date"} for row in self.rows]
        return {"load": {"rows": rows, "series": list(self.rows[-1].series)}}

    def warnings(self) -> list[str]:
        """Return one warning that names the rows which prove nothing, with the reasons."""
        unstable = [f"{row.target}: {row.instability}" for row in self.rows if row.instability]
        if not unstable:
            return []
        return [f"The load is unstable and proves nothing here ({'. '.join(unstable)}). {AGAIN}"]

    @staticmethod
    def values(report: Json) -> Json:
        """Return the load in words, for the template."""
        rows = report.get("load", {}).get("rows", [])
        return {"load_text": load_text, "unstable": any(row["unstable"] for row in rows)}

    @staticmethod
    def plots(report: Json) -> dict[str, str]:
        """Return the bars of both models, and the use of the candidate's cache."""
        if "load" not in report:
            return {}
        return {
            "load": bars_plot(report["load"]["rows"]),
            "load_use": use_plot(report["load"]["series"], name="load-use"),
        }

    @staticmethod
    def card(report: Json) -> list[str]:
        """Return the table of both models and its conditions."""
        rows = report.get("load", {}).get("rows", [])
        if not rows:
            return []
        first = rows[0]
        limited = first["request_goodput"] is not None
        head = ["model", "requests/s", *(["good requests/s"] if limited else []), "output tokens/s"]
        head += ["TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "KV use"]
        body = [
            [
                row["target"] + (" (unstable)" if row["unstable"] else ""),
                number(row["request_throughput"]),
                *([number(row["request_goodput"])] if limited else []),
                number(row["output_throughput"]),
                *(number(row[f"{part}_{time}_ms"]) for time in ("ttft", "itl") for part in ("median", "p99")),
                "–" if row["kv_utilization"] is None else percent(row["kv_utilization"], 0),
            ]
            for row in rows
        ]
        limits = ", ".join(
            f"{name.upper()} {limit:g} ms" for name, limit in first["goodput_limits_ms"].items()
        )
        note = (
            f"{number(first['num_prompts'])} requests a repeat, {load_text(first)}; medians over "
            f"{first['repeats']} repeats, both models in turn. Times in milliseconds, the wait in the queue "
            "included."
        )
        return [
            "## Under load",
            markdown_table(head, body),
            note + (f" Good: within {limits}." if limits else ""),
        ]
