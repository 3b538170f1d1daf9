"""Numbers, sizes and names as the report and the model card print them."""

import math
import re
import shlex
from collections.abc import Sequence
from typing import Any

from compress.untrusted.text import one_line

Json = dict[str, Any]

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_LABELS = {
    "kv_cache": "KV cache",
    "ppl": "Perplexity",
    "ppl_ratio": "Perplexity ratio",
    "bits_per_byte": "Bits per byte",
    "kl": "KL",
    "kl_mean": "Mean KL",
    "kl_p99": "KL, 99th percentile",
    "kl_p999": "KL, 99.9th percentile",
    "kl_max": "KL, largest",
    "top1": "Top-1 agreement",
    "size_ratio": "Size ratio",
    "ttft_ms_p50": "Time to first token, median (ms)",
    "ttft_ms_p95": "Time to first token, p95 (ms)",
    "ttft_ms_p99": "Time to first token, p99 (ms)",
    "tpot_ms_p50": "Time per token, median (ms)",
    "tpot_ms_p95": "Time per token, p95 (ms)",
    "tpot_ms_p99": "Time per token, p99 (ms)",
    "itl_ms_p99": "Gap between tokens, p99 (ms)",
    "output_tokens_per_s": "Output tokens per second",
    "goodput": "Good requests per second",
    "floor_frac": "Share of the floor",
    "acceptance_length": "Acceptance length",
    "speedup": "Speed-up by speculation",
    "accuracy_drop": "Drop of accuracy",
    "num_samples": "Samples",
    "seq_len": "Tokens per sample",
    "num_sms": "Streaming multiprocessors",
    "sm": "Compute capability",
    "clock_sm_mhz": "Processor clock (MHz)",
    "clock_sm_max_mhz": "Largest processor clock (MHz)",
    "clock_memory_mhz": "Memory clock (MHz)",
    "os": "Operating system",
    "cuda": "CUDA",
}


def number(value: float | int | None, digits: int = 3) -> str:
    """Return `digits` significant figures, thousands separated; powers of ten only where they save the reader
    counting zeros.
    """
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -4:
        mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa} × {power_of_ten(int(power))}"
    return f"{value:,.{max(digits - 1 - exponent, 0)}f}"


def power_of_ten(exponent: int) -> str:
    """Return a power of ten with a raised exponent, such as 10⁻³."""
    return f"10{str(exponent).translate(_SUPERSCRIPTS)}"


def byte_size(value: float) -> str:
    """Return bytes in decimal units, as disks and bandwidths count."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{number(value / scale)} {unit}"
    return f"{value:g} B"


def percent(value: float, decimals: int = 1) -> str:
    """Return a share in percent; agreement just short of all is never rounded up to all."""
    shown = f"{value * 100:.{decimals}f}"
    return f"> {100 - 10**-decimals:.{decimals}f} %" if value < 1 and float(shown) >= 100 else f"{shown} %"


def signed_percent(value: float) -> str:
    """Return a change in whole percent with its sign; a change that rounds to nothing has none."""
    shown = round(value * 100)
    return f"{'+' if shown > 0 else '−' if shown < 0 else ''}{abs(shown)} %"


def label(name: str) -> str:
    """Return words for the name of a metric or fact; `<stage>.<metric>` is the effect of that stage alone,
    `load.<metric>` a number measured under load, and `tasks.<name>.<metric>` one of a task.
    """
    stage, _, metric = name.rpartition(".")
    words = _LABELS.get(metric, metric.replace("_", " ").capitalize())
    if stage == "load":
        return f"{words}, under load"
    if stage.startswith("tasks."):
        return f"{words}, {stage.removeprefix('tasks.')}"
    return f"{words}, {stage} alone" if stage else words


def ranges(numbers: Sequence[int]) -> str:
    """Return `0–3, 7` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for each in sorted(numbers):
        if runs and each == runs[-1][-1] + 1:
            runs[-1].append(each)
        else:
            runs.append([each])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def interval(estimate: Json, digits: int) -> str:
    """Return the interval of an estimate as `[lower, upper]`."""
    return f"[{number(estimate['lower'], digits)}, {number(estimate['upper'], digits)}]"


_MARKDOWN = re.compile(r"[\\`*\[\]<>|~]|(?<![^\W_])_|_(?![^\W_])")
"""Characters that Markdown may take for more than text; an underscore inside a word is text."""


def markdown_text(text: str) -> str:
    """Return a text that somebody else wrote as one line of Markdown that shows it and nothing more."""
    return _MARKDOWN.sub(lambda found: "\\" + found[0], one_line(text))


def markdown_sentence(text: str) -> str:
    """Return a message of this program as one line of Markdown: as `markdown_text`, with its code spans."""
    parts = re.split(r"((?<!`)`[^`]+`(?!`))", one_line(text))
    return "".join(part if index % 2 else markdown_text(part) for index, part in enumerate(parts))


def markdown_code(text: str) -> str:
    """Return a text that somebody else wrote as a code span, which none of its backticks ends."""
    shown = one_line(text)
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    pad = " " if longest else ""
    return f"{'`' * (longest + 1)}{pad}{shown}{pad}{'`' * (longest + 1)}"


def shell_word(text: str) -> str:
    """Return a text as one word of a POSIX shell on one line; of bash, where it has control characters."""
    if one_line(text) == text:
        return shlex.quote(text)
    escaped = one_line(text.replace("\\", "\\\\").replace("'", "\\'"))
    return f"$'{escaped}'"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose first column is text and whose other columns are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
