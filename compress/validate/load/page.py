"""A sweep of loads as one self-contained HTML page: a table, the pictures, and how they were measured. It is
a pure function of the document that `compress bench --json` prints.
"""

import math
from typing import Any

from compress.validate.display import Json
from compress.validate.load.pictures import bars_plot, load_value, sweep_plot, use_plot
from compress.validate.report import template_environment

TEMPLATE = "load/page.html.j2"


def render_load_page(document: Json) -> str:
    """Return the page of a document with `rows`, `series` and `environment`."""
    from markupsafe import Markup

    rows = document["rows"]
    plots: dict[str, str] = {}
    loads = {load_value(row) for row in rows}
    if len(loads) > 1 and all(map(math.isfinite, loads)):
        plots["sweep"] = sweep_plot(rows)
    elif len(rows) > 1:
        plots["bars"] = bars_plot([{**row, "target": _name(row, rows)} for row in rows])
    last = {each["target"]: each for each in document.get("series", []) if each["samples"]}
    uses = [
        {
            "target": name,
            "load": each["load"],
            "picture": Markup(use_plot(each["samples"], name=f"use-{idx}")),
        }
        for idx, (name, each) in enumerate(last.items())
    ]
    # Markup is trusted here: matplotlib wrote it and escapes the text that it is given.
    marked = {name: Markup(svg) for name, svg in plots.items()}
    page = template_environment().get_template(TEMPLATE)
    return page.render(report=document, plots=marked, uses=uses, load_text=load_text, any=_any(rows))


def load_text(row: Json) -> str:
    """Return the load of a row in words, such as `4 /s` or `16 clients`."""
    if row["mode"] == "trace":
        return f"trace, {row['request_rate']:.3g} /s" if row["request_rate"] != "inf" else "trace"
    if isinstance(row["request_rate"], int | float):
        bursts = "" if row["burstiness"] == 1 else f", burstiness {row['burstiness']:g}"
        return f"{row['request_rate']:g} /s{bursts}"
    if row["max_concurrency"] is None:
        return "all at once"
    return f"{row['max_concurrency']} client{'s' if row['max_concurrency'] != 1 else ''}"


def _name(row: Json, rows: list[Json]) -> str:
    several = len({load_text(each) for each in rows}) > 1
    return f"{row['target']}, {load_text(row)}" if several else str(row["target"])


def _any(rows: list[Json]) -> dict[str, Any]:
    """Return which columns and notes the page has."""
    return {
        "goodput": any(row["request_goodput"] is not None for row in rows),
        "use": any(row.get("kv_utilization") is not None for row in rows),
        "preempted": any(row.get("preemptions") for row in rows),
        "failed": any(row["failed"] for row in rows),
        "chunks": [row for row in rows if row["backend"] != "compress" and row["tokens_per_chunk"] > 1.005],
        "inferred": any(row["inferred_chunks"] for row in rows),
        "short": any(row["short_outputs"] for row in rows),
        "hits": any(row["cached_tokens"] for row in rows),
        "lag_ms": max((row.get("p99_client_lag_ms") or 0.0 for row in rows), default=0.0),
        "repeats": max((row["repeats"] for row in rows), default=1),
    }
