"""Tables of mixtures of experts: serving, quantizing, policies for starved experts, and pruned experts."""

from scripts.docs.markdown import bold, fixed, gigabytes, table
from scripts.docs.result_files import Row, Run, result_file
from scripts.docs.tables.performance import METHODS

PRUNED = "prune-"


def serving_run() -> Run:
    """Return the run that times serving of a mixture."""
    return result_file("h200/moe").run


def decoding() -> list[Row]:
    """Return the rows of decode steps."""
    return serving_run().where(prompt_tokens=min(row["prompt_tokens"] for row in serving_run().rows))


def prompts() -> list[Row]:
    """Return the rows of one long prompt."""
    return serving_run().where(prompt_tokens=max(row["prompt_tokens"] for row in serving_run().rows))


def serving() -> str:
    """Return the table of times a token, by scheme and batch, against the bytes that are hit."""
    rows = [
        [
            f"`{row['scheme']}`",
            row["batch_size"],
            fixed(row["experts_hit"]),
            bold(f"{fixed(row['tpot_ms_p50'], 2)} ms"),
            f"{fixed(row['tpot_ms_p50_lower'], 2)} .. {fixed(row['tpot_ms_p50_upper'], 2)}",
            f"{fixed(row['floor_ms'], 2)} ms",
            f"{fixed(row['tpot_ms_p50'] / row['floor_ms'], 2)} x",
        ]
        for row in decoding()
    ]
    header = ["weights", "batch", "experts hit", "TPOT, median", "interval", "floor", "TPOT / floor"]
    return table(header, rows, align="lrrrrrr")


def quantizing_run() -> Run:
    """Return the run that times the quantize stage of a mixture."""
    return result_file("h200/moe_quantize").run


def quantizing() -> str:
    """Return the table of seconds and memory of the quantize stage."""
    rows = [
        [
            METHODS[row["method"]],
            fixed(row["seconds_per_layer"], 1),
            bold(f"{fixed(row['full_model_seconds'] / 60, 1)} min"),
            gigabytes(row["peak_device_bytes"]),
        ]
        for row in quantizing_run().rows
    ]
    return table(["method", "s a layer", "all layers", "peak GPU memory"], rows, align="lrrr")


def quality_run() -> Run:
    """Return the run that trains a small mixture and compresses it."""
    return result_file("h200/moe_quality").run


def quality() -> str:
    """Return the table of methods and policies for starved experts."""
    rows = [
        [
            METHODS[row["method"]],
            "-" if row["method"] == "rtn" else f"`{row['starved']}`",
            bold(fixed(1000 * row["kl"], 2)),
            f"{100 * row['same_top']:.1f} %",
            fixed(row["seconds"], 1),
        ]
        for row in quality_run().rows
        if not row["method"].startswith(PRUNED)
    ]
    return table(["method", "`starved`", "KL, thousandths", "same top token", "s"], rows, align="llrrr")


def pruning() -> str:
    """Return the table of pruned experts."""
    rows = [
        [
            row["method"].removeprefix(PRUNED),
            f"{row['experts']} of {row['of']}",
            f"{row['steps']} steps" if row["recovered"] else "-",
            bold(fixed(row["kl"], 3)),
            f"{100 * row['same_top']:.1f} %",
        ]
        for row in quality_run().rows
        if row["method"].startswith(PRUNED)
    ]
    return table(["chosen by", "experts", "distilled", "KL", "same top token"], rows, align="llrrr")
