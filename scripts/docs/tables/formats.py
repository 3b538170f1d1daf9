"""Tables of formats that were measured beside one another: serving and linears by scheme, and attention by
format of the cache."""

from scripts.docs.markdown import bold, fixed, table
from scripts.docs.result_files import Row, Run, result_file
from scripts.docs.tables.performance import scheme_text


def serving_run() -> Run:
    """Return the run that times every format of weights in a step."""
    return result_file("h200/runtime_formats").run


def serving(run: Run) -> str:
    """Return the table of times a token and to the first of a long prompt, by scheme."""
    long = {row["scheme"]: row for row in run.rows if "ttft_floor_ms" in row}
    batches = sorted({row["batch_size"] for row in run.rows})
    rows = [
        [
            scheme_text(scheme),
            *(bold(f"{fixed(decoding(run, scheme, batch)['tpot_ms_p50'], 2)} ms") for batch in batches),
            f"{fixed(long[scheme]['ttft_ms_p50'], 1)} ms",
        ]
        for scheme in long
    ]
    tokens = fixed(next(iter(long.values()))["prompt_tokens"])
    header = ["weights", *(f"TPOT, batch {batch}" for batch in batches), f"TTFT of {tokens} tokens"]
    return table(header, rows, align="l" + "r" * (len(batches) + 1))


def decoding(run: Run, scheme: str, batch_size: int) -> Row:
    """Return the row of decode steps of a scheme."""
    found = run.where(scheme=scheme, batch_size=batch_size)
    return next(row for row in found if "ttft_floor_ms" not in row)


def first_token_ms(run: Run, scheme: str) -> float:
    """Return the median milliseconds to the first token of the long prompt."""
    return float(next(row["ttft_ms_p50"] for row in run.where(scheme=scheme) if "ttft_floor_ms" in row))


def linears_run() -> Run:
    """Return the run that times linears in every format of weights."""
    return result_file("h200/kernels_formats").run


def linears(run: Run) -> str:
    """Return the table of the gate and up projections by format: time of decode rows, rate of a prompt."""
    decoded = (1, 16, 64)
    header = ["weights", *(f"{each} row{'s' if each > 1 else ''}" for each in decoded), "2,048 rows"]
    found = {
        (row["scheme"], row["m"]): row for row in run.where(tool="compress", op="linear", name="gate_up")
    }
    rows = [
        [
            scheme_text(scheme),
            *(
                f"{bold(fixed(found[scheme, each]['us'], 1))} us, "
                f"{100 * found[scheme, each]['bandwidth_frac']:.0f} %"
                for each in decoded
            ),
            f"{fixed(found[scheme, 2048]['tflop_per_s'])} TFLOP/s",
        ]
        for scheme in dict.fromkeys(scheme for scheme, _ in found)
    ]
    return table(header, rows, align="lrrrr")


def attention_runs() -> list[Run]:
    """Return the runs that time decode attention by format of the cache, one for each GPU, newest first."""
    return [result_file(name).run for name in ("h200/kv_attention", "h100/kv_attention")]


def attention(run: Run) -> str:
    """Return the table of decode attention by format, context and requests."""
    rows = [
        [
            f"`{row['scheme']}`",
            row["name"].removeprefix("context "),
            fixed(row["m"]),
            bold(f"{fixed(row['us'], 1)} us"),
            fixed(row["tb_per_s"], 2),
            f"{100 * row['bandwidth_frac']:.0f} %",
        ]
        for row in run.rows
    ]
    return table(["cache", "context", "requests", "median", "TB/s", "of the bandwidth"], rows, align="lrrrrr")


def attention_us(cache: str, context: int, requests: int) -> float:
    """Return the microseconds of attention in the newest run."""
    return float(_attention_row(cache, context, requests)["us"])


def bandwidth_percent(cache: str, context: int, requests: int) -> str:
    """Return the share of the bandwidth that attention reaches in the newest run, in percent."""
    return f"{100 * _attention_row(cache, context, requests)['bandwidth_frac']:.0f}"


def _attention_row(cache: str, context: int, requests: int) -> Row:
    return attention_runs()[0].one(scheme=cache, name=f"context {context}", m=requests)
