"""Tables of tasks: what ways of quantizing cost in points of benchmarks, and lm-eval on two backends."""

from compress.validate.parts.tasks import drop_text
from scripts.docs.markdown import bold, fixed, table
from scripts.docs.result_files import Row, Run, result_file

TITLES = {
    "fast": "Four bits, `preset: fast`",
    "balanced": "Four bits, `preset: balanced`",
    "FP8": "FP8",
}


def main_run() -> Run:
    """Return the run of the recovery tables."""
    return result_file("tasks").run


def ways() -> list[str]:
    """Return the ways of quantizing, in the order in which they were measured."""
    return list(dict.fromkeys(row["way"] for row in main_run().where(kind="recovery")))


def title(way: str) -> str:
    """Return the heading of a way of quantizing."""
    (scheme,) = {row["scheme"] for row in main_run().where(way=way)}
    return f"{TITLES[way]}, `{scheme}`"


def prose_run() -> Run:
    """Return the run whose calibration text is prose."""
    return result_file("tasks_prose").run


def recovery(way: str, run: Run | None = None) -> str:
    """Return the recovery table of a way of quantizing."""
    run = run or main_run()
    header = ["task", "items", "source", "candidate", "recovery", "drop, points", "verdict", "shows", "needs"]
    rows = [
        [
            f"{row['name']}, {row['metric'].replace('_', ' ')}",
            f"{fixed(row['num_items'])} of {fixed(row['num_available'])}",
            f"{100 * row['source']:.1f} %",
            f"{100 * row['candidate']:.1f} %",
            "–" if row["recovery"] is None else f"{100 * row['recovery']:.1f} %",
            drop_text(row),
            row["verdict"],
            f"{100 * row['detectable_drop']:.1f}",
            fixed(row["items_needed"]),
        ]
        for row in run.where(kind="recovery", way=way)
    ]
    return table(header, rows, align="lrrrrrlrr")


def scoring_run() -> Run:
    """Return the run of scoring beside a plain loop over transformers."""
    return result_file("h200/scoring").run


def scoring() -> str:
    """Return the table of scoring beside a plain loop."""
    header = ["model", "task", "items", "same score", "s, this engine", "s, plain loop", "times as fast"]
    rows = [
        [
            f"`{row['model']}`",
            row["task"],
            fixed(row["num_items"]),
            fixed(row["num_equal"]),
            fixed(row["seconds"], 2),
            fixed(row["seconds_loop"], 2),
            bold(fixed(row["times_faster"], 1)),
        ]
        for row in scoring_run().rows
    ]
    return table(header, rows, align="llrrrrr")


def adapter_rows() -> list[Row]:
    """Return the rows of lm-eval on both backends, if they were measured."""
    return main_run().where(kind="adapter")


def adapter() -> str:
    """Return the table of lm-eval on both backends."""
    header = ["task", "items", "same score", "largest difference, nats", "s, this engine", "s, `hf`"]
    rows = [
        [
            row["name"],
            fixed(row["num_items"]),
            fixed(row["num_equal"]),
            f"{row['largest_difference']:.1e}",
            fixed(row["seconds"], 1),
            fixed(row["seconds_hf"], 1),
        ]
        for row in adapter_rows()
    ]
    return table(header, rows, align="lrrrrr")
