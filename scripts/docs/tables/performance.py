"""Tables of time and memory: serving, kernels, and quantizing itself."""

from scripts.docs.markdown import bold, fixed, gigabytes, table
from scripts.docs.result_files import Row, Run, result_file

METHODS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "awq+gptq": "AWQ and GPTQ",
    "fp8-static": "FP8, static inputs",
    "balanced": "`preset: balanced`",
    "rtn": "plain rounding",
    "fp8-dynamic": "FP8, dynamic inputs",
    "copy": "copy of the checkpoint",
}
ROWS = (1, 16, 64)
"""Tokens of a decode step that the kernel table shows."""


def runtime_run() -> Run:
    """Return the run that times serving."""
    return result_file("h200/runtime").run


def serving() -> str:
    """Return the table of times a token, by scheme and batch."""
    run = runtime_run()
    header = [
        "weights",
        "batch",
        "TPOT, median",
        "interval",
        "p99",
        "floor",
        "floor / TPOT",
        "against 16 bits",
        "tokens a second",
        "TTFT",
    ]
    rows = []
    for row in _decoding(run):
        dense = run.one(scheme="BF16", batch_size=row["batch_size"], prompt_tokens=row["prompt_tokens"])
        rows.append(
            [
                scheme_text(row["scheme"]),
                row["batch_size"],
                bold(f"{fixed(row['tpot_ms_p50'], 2)} ms"),
                f"{fixed(row['tpot_ms_p50_lower'], 2)} .. {fixed(row['tpot_ms_p50_upper'], 2)}",
                fixed(row["tpot_ms_p99"], 2),
                f"{fixed(row['floor_ms'], 2)} ms",
                f"{100 * row['floor_frac']:.0f} %",
                "" if row is dense else f"{fixed(dense['tpot_ms_p50'] / row['tpot_ms_p50'], 2)} x",
                fixed(row["output_tokens_per_s"]),
                f"{fixed(row['ttft_ms_p50'])} ms",
            ]
        )
    return table(header, rows, align="lrrrrrrrrr")


def long_prompts() -> str:
    """Return the table of the time to the first token of one long prompt."""
    run = runtime_run()
    rows = [
        [
            scheme_text(row["scheme"]),
            fixed(row["prompt_tokens"]),
            f"{fixed(row['ttft_ms_p50'], 1)} ms",
            f"{fixed(row['ttft_floor_ms'], 1)} ms",
        ]
        for row in run.rows
        if "ttft_floor_ms" in row
    ]
    return table(["weights", "prompt tokens", "TTFT, median", "floor"], rows, align="lrrr")


def tpot(scheme: str, batch_size: int) -> float:
    """Return the median time a token in milliseconds of a scheme, at the common prompt length."""
    return float(next(row for row in _decoding(runtime_run()) if _is(row, scheme, batch_size))["tpot_ms_p50"])


def speedup(scheme: str, batch_size: int) -> float:
    """Return how many times as fast a token of a scheme is as one of 16-bit weights."""
    return tpot("BF16", batch_size) / tpot(scheme, batch_size)


def waterfall_run() -> Run:
    """Return the run that goes from `transformers` to everything on."""
    return result_file("h200/waterfall").run


def waterfall() -> str:
    """Return the table of one shape as one technique after the other is switched on."""
    run = waterfall_run()
    batches = sorted({row["batch_size"] for row in run.rows})
    first = {batch: run.where(batch_size=batch)[0] for batch in batches}
    header = ["everything above, and", "weights"]
    for batch in batches:
        header += [f"TTFT, batch {batch}", f"TPOT, batch {batch}", "gain"]
    rows = []
    for step in dict.fromkeys(row["step"] for row in run.rows):
        cells = [step, gigabytes(run.where(step=step)[0]["weight_bytes"])]
        for batch in batches:
            row = run.one(step=step, batch_size=batch)
            cells += [
                f"{fixed(row['ttft_ms_p50'])} ms",
                f"{fixed(row['tpot_ms_p50'], 2)} ms",
                f"{fixed(first[batch]['tpot_ms_p50'] / row['tpot_ms_p50'], 1)} x",
            ]
        rows.append(cells)
    return table(header, rows, align="lr" + "rrr" * len(batches))


def kernels_run() -> Run:
    """Return the run that times kernels."""
    return result_file("h200/kernels").run


def linears() -> str:
    """Return the table of decode linears: microseconds and terabytes a second, and torch's own."""
    run = kernels_run()
    header = ["linear", "N x K", "weights"]
    for count in ROWS:
        header += [f"{count} row{'s' if count > 1 else ''}, us", "TB/s", "torch, us"]
    rows = []
    kinds = dict.fromkeys(
        (row["name"], row["scheme"]) for row in run.where(tool="compress", op="linear", phase="decode")
    )
    for name, scheme in kinds:
        found = {row["m"]: row for row in run.where(tool="compress", op="linear", name=name, scheme=scheme)}
        theirs = {row["m"]: row for row in run.where(tool="torch", op="linear", name=name, scheme=scheme)}
        cells = [name, " x ".join(f"{size:,}" for size in found[ROWS[0]]["shape"]), scheme_text(scheme)]
        for count in ROWS:
            cells += [
                bold(fixed(found[count]["us"], 1)),
                fixed(found[count]["tb_per_s"], 2),
                fixed(theirs[count]["us"], 1) if count in theirs else "",
            ]
        rows.append(cells)
    return table(header, rows, align="lll" + "rrr" * len(ROWS))


def attention() -> str:
    """Return the table of attention kernels."""
    header = ["op", "case", "cache", "us", "TB/s", "TFLOP/s", "kernel"]
    rows = []
    for row in kernels_run().rows:
        if row["op"] in ("attention_decode", "attention_prefill"):
            rows.append(
                [
                    "decode" if row["op"] == "attention_decode" else "prefill",
                    row["name"]
                    + (
                        f", {row['m']} request{'s' if row['m'] > 1 else ''}"
                        if row["phase"] == "decode"
                        else ""
                    ),
                    f"`{row['scheme']}`",
                    fixed(row["us"], 1),
                    fixed(row["tb_per_s"], 2) if row["phase"] == "decode" else "",
                    fixed(row["tflop_per_s"]) if row["phase"] == "prefill" else "",
                    f"{row['tool']}: `{row['kernel']}`",
                ]
            )
    return table(header, rows, align="lllrrrl")


def attention_row(cache: str) -> Row:
    """Return the row of decode attention over a long context, 16 requests, in that cache."""
    return kernels_run().one(tool="compress", op="attention_decode", name="context 8192", scheme=cache, m=16)


def prefill_rates() -> str:
    """Return the TFLOP/s of prefill attention, ours and torch's, by length."""
    found: dict[int, dict[str, float]] = {}
    for row in kernels_run().where(op="attention_prefill", scheme="BF16"):
        found.setdefault(row["m"], {})[row["tool"]] = row["tflop_per_s"]
    return ", ".join(
        f"{fixed(each['compress'])} and {fixed(each['torch'])} at {fixed(length)} tokens"
        for length, each in found.items()
    )


def prefill_attention_run() -> Run:
    """Return the run that times prefill attention by the format of the cache."""
    return result_file("h200/kernels_prefill_attention").run


def prefill_attention() -> str:
    """Return the table of prefill attention by the format of the cache."""
    rows = [
        [
            row["name"],
            f"`{row['scheme']}`",
            fixed(row["us"], 1),
            fixed(row["tflop_per_s"]),
            f"{row['tool']}: `{row['kernel']}`",
        ]
        for row in prefill_attention_run().rows
    ]
    return table(["case", "cache", "us", "TFLOP/s", "kernel"], rows, align="llrrl")


def prefill_rate(cache: str, length: int) -> float:
    """Return the TFLOP/s of our prefill attention over a prompt, in that run."""
    run = prefill_attention_run()
    return float(run.one(tool="compress", scheme=cache, m=length)["tflop_per_s"])


def quantizing_runs() -> list[Run]:
    """Return the runs that time the quantize stage, one table each."""
    names = (
        "h200/quantize",
        "h200/quantize_balanced",
        "h200/quantize_data_free",
        "h200/quantize_peers",
    )
    return [result_file(name).run for name in names]


def quantizing(run: Run) -> str:
    """Return the table of one run that times the quantize stage."""
    header = ["tool", "method", "s", "s a layer", "peak GPU memory"]
    rows = [
        [
            row.get("tool", "compress"),
            METHODS[row["method"]],
            bold(fixed(row["seconds"], 1)),
            fixed(row["seconds"] / row["num_layers"], 1),
            gigabytes(row["peak_device_bytes"]) if row["peak_device_bytes"] else "",
        ]
        for row in run.rows
    ]
    return table(header, rows, align="llrrr")


def memory_run() -> Run:
    """Return the run that measures host memory while a model streams through."""
    return result_file("memory").run


def scheme_text(scheme: str) -> str:
    """Return a scheme as a reader writes it: `A+B` is scheme A with an output head in scheme B."""
    weights, _, head = scheme.partition("+")
    return f"`{weights}`" + (f", output head `{head}`" if head else "")


def _decoding(run: Run) -> list[Row]:
    shortest = min(row["prompt_tokens"] for row in run.rows)
    return run.where(prompt_tokens=shortest)


def _is(row: Row, scheme: str, batch_size: int) -> bool:
    return bool(row["scheme"] == scheme and row["batch_size"] == batch_size)
