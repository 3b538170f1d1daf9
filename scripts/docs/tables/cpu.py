"""Times of quantized linears on a CPU, beside the dense model's in the same run."""

from scripts.docs.markdown import bold, fixed, gigabytes, table
from scripts.docs.result_files import Run, result_file


def decode_run() -> Run:
    """Return the run that times decode steps and prompts on a CPU."""
    return result_file("cpu_decode").run


def avx2_run() -> Run:
    """Return the same run with libraries that are held to AVX2."""
    return result_file("cpu_decode_avx2").run


def speedup(scheme: str, **wanted: int) -> float:
    """Return how many times as fast as the dense model a scheme is, by `batch_size` or `prompt_tokens`."""
    return float(decode_run().one(scheme=scheme, **wanted)["speedup_p50"])


def smaller(scheme: str) -> float:
    """Return how many times as many bytes the dense linears hold as those of a scheme."""
    row = decode_run().where(scheme=scheme)[0]
    return float(row["dense_linear_bytes"] / row["linear_bytes"])


def decode(run: Run) -> str:
    """Return the table of times of a run, by scheme and batch or prompt."""
    header = [
        "weights",
        "what",
        "dense, median",
        "median",
        "least",
        "times as fast",
        "worst to best",
        "linears",
    ]
    rows = []
    for row in run.rows:
        decoding = "batch_size" in row
        name = "step_ms" if decoding else "ttft_ms"
        what = f"step of {row['batch_size']}" if decoding else f"prompt of {row['prompt_tokens']}"
        rows.append(
            [
                f"`{row['scheme']}`",
                what,
                f"{fixed(row[f'dense_{name}_p50'])} ms",
                bold(f"{fixed(row[f'{name}_p50'])} ms"),
                f"{fixed(row[f'{name}_min'])} ms",
                f"{fixed(row['speedup_p50'], 2)} x",
                f"{fixed(row['speedup_min'], 2)} to {fixed(row['speedup_max'], 2)}",
                f"{gigabytes(row['linear_bytes'], 2)} for {gigabytes(row['dense_linear_bytes'], 2)}",
            ]
        )
    return table(header, rows, align="llrrrrrr")
