"""Tables of many requests at once: a fixed workload, first tokens, and long prompts among decodes."""

from scripts.docs.markdown import bold, fixed, table
from scripts.docs.result_files import Run, result_file


def runs(experiment: str) -> list[Run]:
    """Return the runs that have rows of an experiment."""
    return [run for run in result_file("h200/serving").runs if run.where(experiment=experiment)]


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
