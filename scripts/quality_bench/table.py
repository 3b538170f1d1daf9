"""The table over methods and schemes, as Markdown, and what it says of `balanced` beside other tools."""

import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
MEANS = ("kl_mean", "kl_p99", "top1", "ppl_ratio", "seconds", "cpu_seconds")


def table(rows: Sequence[Row]) -> str:
    """A line a tool, scheme and method: means over seeds, the spread of seeds as half their range, the 95 %
    interval of the first seed's KL over windows of evaluation text, and the ratio to this project's plain
    rounding in 4 bits, W4A16_G128."""
    base = [
        row["kl_mean"]
        for row in rows
        if (row["tool"], row["scheme"], row["method"]) == ("compress", "W4A16_G128", "rtn")
    ]
    lines = [
        "| scheme | tool | method | seeds | mean KL | ± seeds | 95 % of text | x W4 RTN | p99 KL | top-1 | "
        "perplexity ratio | s | CPU s |",
        "|" + "---|" * 13,
    ]
    for (scheme, tool, method), runs in grouped(rows).items():
        kl = [row["kl_mean"] for row in runs]
        mean = {name: statistics.mean(row[name] for row in runs) for name in MEANS}
        ratio = f"{mean['kl_mean'] / statistics.mean(base):.3f}" if base else ""
        lower, upper = runs[0]["kl_interval"]
        found = (
            f"{mean['kl_mean']:.5f} | {(max(kl) - min(kl)) / 2:.5f} | {lower:.5f}-{upper:.5f} | {ratio} | "
            f"{mean['kl_p99']:.4f}"
        )
        times = f"{mean['seconds']:.1f} | {mean['cpu_seconds']:.1f}"
        lines.append(
            f"| {scheme} | {tool} | {method} | {len(runs)} | {found} | {mean['top1']:.4f} | "
            f"{mean['ppl_ratio']:.4f} | {times} |"
        )
    return "\n".join(lines)


def beside_peers(rows: Sequence[Row]) -> list[str]:
    """A sentence a tool: its KL and processor time over those of `balanced` in the same scheme, on the seeds
    that both have."""
    groups = grouped(rows)
    sentences = []
    for (scheme, tool, method), runs in groups.items():
        ours = {row["seed"]: row for row in groups.get((scheme, "compress", "balanced"), [])}
        pairs = [(row, ours[row["seed"]]) for row in runs if row["seed"] in ours]
        if tool == "compress" or not pairs:
            continue
        kl, seconds = (
            statistics.mean(a[name] for a, _ in pairs) / statistics.mean(b[name] for _, b in pairs)
            for name in ("kl_mean", "cpu_seconds")
        )
        sentences.append(
            f"{scheme}: {tool} {method} has {kl:.2f} x the KL of balanced and takes {seconds:.2f} x its "
            "processor time."
        )
    return sentences


def grouped(rows: Sequence[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """(scheme, tool, method) -> rows, schemes together, in order of appearance."""
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda each: schemes.index(each["scheme"])):
        groups.setdefault((row["scheme"], row["tool"], row["method"]), []).append(row)
    return groups
