"""The table of a few layers of every known shape."""

from collections import defaultdict

from scripts.docs.markdown import bold, fixed, table
from scripts.docs.result_files import Row, Run, result_file


def runs() -> list[Run]:
    """Return the runs that time a few layers of shapes."""
    return result_file("h200/shapes").runs


def by_excess(run: Run) -> str:
    """Return the table of decode steps and of prompts, the shapes first that are the furthest from the bytes
    of their layers. Every shape has rows of two batch sizes."""
    by_shape: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in run.rows:
        if "refused" not in row:
            by_shape[row["shape"], row["scheme"]].append(row)
    largest = max(row["batch_size"] for row in run.rows if "refused" not in row)
    rows = []
    for (shape, scheme), (one, many) in sorted(by_shape.items(), key=lambda each: -_excess_us(each[1][0])):
        rows.append(
            [
                shape,
                f"`{scheme}`",
                one["num_layers"],
                bold(f"{fixed(_excess_us(one))} us"),
                *(each for row in (one, many) for each in _step(row)),
                f"{fixed(one['ttft_ms_p50'], 1)} ms",
                ", ".join(one["references"]) or "-",
            ]
        )
    header = [
        "shape",
        "weights",
        "layers",
        "above the floor, a layer",
        "step of one",
        "x floor",
        f"step of {largest}",
        "x floor",
        "TTFT",
        "references",
    ]
    return table(header, rows, align="llrrrrrrrl")


def _excess_us(row: Row) -> float:
    """Return what a layer takes longer than its bytes do."""
    return float(row["step_ms_p50"] - row["floor_ms"]) / int(row["num_layers"]) * 1e3


def _step(row: Row) -> tuple[str, str]:
    return f"{fixed(row['step_ms_p50'], 2)} ms", fixed(row["step_ms_p50"] / row["floor_ms"], 1)
