"""Tables of many requests at once: a fixed workload, first tokens, long prompts among decodes, arrivals of a
trace and at a low rate, and long contexts.
"""

from typing import Any

from scripts.docs.markdown import bold, fixed, table
from scripts.docs.result_files import Row, Run, result_file

_DRAWN = "workload_512"


def runs(experiment: str) -> list[Run]:
    """Return the runs that have rows of an experiment."""
    return [run for run in result_file("h200/serving").runs if run.where(experiment=experiment)]


def runs_with_states() -> list[Run]:
    """Return the runs of first tokens of models with delta nets."""
    return [result_file(f"h200/serving_{name}").run for name in ("qwen3.5-9b", "qwen3.5-35b-a3b")]


def one(experiment: str, **wanted: Any) -> Row:
    """Return the only row of an experiment with these values."""
    (row,) = (row for run in runs(experiment) for row in run.where(experiment=experiment, **wanted))
    return row


def arrivals(*, drawn: bool) -> list[Run]:
    """Return the runs whose requests arrive: those drawn by the law of the fixed workload, or of a trace."""
    return [run for run in runs("trace") if (run.rows[0]["trace"] == _DRAWN) == drawn]


def long_context_run() -> Run:
    """Return the run that times a long context by the format of the cache."""
    return result_file("h200/long_context").run


def indexer_runs() -> list[Run]:
    """Return the runs that time the choices of indexers, those of pooled blocks in one of their own."""
    return [result_file(f"h200/{name}").run for name in ("indexers", "indexers_pooled")]


def policies(run: Run) -> str:
    """Return the table of requests that arrive at a low rate, by policy of batching."""
    rows = [
        [
            row["policy"],
            bold(f"{fixed(row['e2el_ms_p50'])} ms"),
            f"{fixed(row['ttft_ms_p50'])} ms",
            f"{fixed(row['itl_ms_p50'], 1)} ms",
            fixed(row["req_s"], 1),
        ]
        for row in run.where(experiment="trace")
    ]
    header = ["policy", "whole request, median", "TTFT, median", "ITL, median", "requests/s done"]
    return table(header, rows, align="lrrrr")


def long_contexts(run: Run) -> str:
    """Return the table of times of first and later tokens at a long context, by the format of the cache."""
    rows = [
        [
            row["kv"],
            row["batch_size"],
            f"{fixed(row['ttft_ms_p50'])} ms",
            bold(f"{fixed(row['tpot_ms_p50'], 2)} ms"),
            f"{fixed(row['tpot_ms_p10'], 2)} .. {fixed(row['tpot_ms_p90'], 2)}",
            fixed(row["tokens_per_gib"]),
        ]
        for row in run.rows
    ]
    header = [
        "KV cache",
        "requests",
        "TTFT, median",
        "TPOT, median",
        "10th to 90th percentile",
        "tokens a GiB holds",
    ]
    return table(header, rows, align="lrrrrr")


def indexers(run: Run) -> str:
    """Return the table of times that indexers take to choose keys, of the kernel that serves and of the
    reference where it was timed."""
    served = [row for row in run.rows if row["kernel"] != "reference"]
    reference = {_choice(row): row for row in run.where(kernel="reference")}
    rows = [
        [
            row["indexer"],
            f"{row['context']:,}",
            f"{row['rows']:,} of a prompt" if row["prompt"] else row["rows"],
            bold(f"{fixed(row['us'])} us"),
            f"{fixed(row['us_p10'])} .. {fixed(row['us_p90'])}",
            f"{fixed(reference[_choice(row)]['us'])} us" if _choice(row) in reference else "-",
        ]
        for row in served
    ]
    header = ["indexer", "context", "rows", "median", "10th to 90th percentile", "reference"]
    return table(header, rows, align="lrrrrr")


def _choice(row: dict[str, Any]) -> tuple[str, int, int, bool]:
    return row["indexer"], row["context"], row["rows"], row["prompt"]


def workload(run: Run) -> str:
    """Return the table of throughput and times between tokens, by requests at once and host."""
    rows = [
        [
            f"`{row['scheme']}`",
            row["max_running"],
            row["policy"],
            row["host"],
            bold(fixed(row["req_s"], 1)),
            fixed(row["output_tok_s"]),
            f"{fixed(row['itl_ms_p50'], 1)} ms",
            f"{fixed(row['itl_ms_p99'], 1)} ms",
            f"{fixed(100 * row['kv_utilization'], 1)} %",
        ]
        for row in run.where(experiment="workload_512")
    ]
    header = [
        "weights",
        "at once",
        "policy",
        "host",
        "requests/s",
        "tokens/s",
        "ITL, median",
        "ITL, p99",
        "live positions",
    ]
    return table(header, rows, align="lrllrrrrr")


def first_tokens(run: Run) -> str:
    """Return the table of times to the first token, by cached prefix and burst."""
    rows = [
        [
            f"`{row['scheme']}`",
            row["prompt_tokens"],
            row["cached_tokens"],
            row["burst"],
            row["host"],
            bold(f"{fixed(row['ttft_ms_p50'], 1)} ms"),
            f"{fixed(row['ttft_ms_p50_least'], 1)} .. {fixed(row['ttft_ms_p50_largest'], 1)}",
        ]
        for row in run.where(experiment="ttft")
    ]
    header = ["weights", "prompt", "of it cached", "arrive at once", "host", "TTFT, median", "of repeats"]
    return table(header, rows, align="lrrrlrr")


def mixed(run: Run) -> str:
    """Return the table of times between tokens while long prompts arrive, by tokens of a step."""
    rows = [
        [
            f"`{row['scheme']}`",
            row["step_tokens"],
            f"{fixed(row['itl_ms_p50_alone'], 1)} ms",
            bold(f"{fixed(row['itl_ms_p50'], 1)} ms"),
            f"{fixed(row['itl_ms_max'], 1)} ms",
            f"{fixed(row['long_ttft_ms'])} ms",
        ]
        for row in run.where(experiment="itl_mixed")
    ]
    header = ["weights", "tokens a step", "ITL alone", "ITL meanwhile", "worst", "TTFT of the long prompt"]
    return table(header, rows, align="lrrrrr")


def traced(run: Run) -> str:
    """Return the table of requests that arrive by a trace."""
    rows = [
        [
            f"`{row['scheme']}`",
            f"{fixed(row['request_rate'], 1)} and {fixed(row['req_s'], 1)}",
            bold(f"{fixed(row['ttft_ms_p50'])} ms"),
            f"{fixed(row['ttft_ms_p99'])} ms",
            f"{fixed(row['itl_ms_p50'], 1)} ms",
            f"{fixed(row['itl_ms_p99'], 1)} ms",
        ]
        for row in run.where(experiment="trace")
    ]
    times = ["TTFT, median", "TTFT, p99", "ITL, median", "ITL, p99"]
    header = ["weights", "requests/s offered and done", *times]
    return table(header, rows, align="lrrrrr")
