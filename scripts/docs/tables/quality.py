"""Tables of accuracy: methods and schemes on the bundled model, other tools, and quantized KV caches."""

import json
from collections.abc import Mapping
from statistics import mean
from typing import Any

from scripts.docs.markdown import bold, fixed, significant, table
from scripts.docs.result_files import Row, Run, result_file
from scripts.quality_bench.methods import METHODS

FOUR_BIT = "W4A16_G128"
LADDER = {
    "rtn": "RTN, min-max scales",
    "rtn+search": "RTN, searched scales",
    "awq-scales": "AWQ, scales alone",
    "awq": "AWQ",
    "gptq": "GPTQ, min-max scales",
    "gptq+search": "GPTQ",
    "gptq+search+in-turn": "GPTQ, linears of a layer in sequence",
    "awq+gptq": "AWQ and GPTQ",
    "rtn+search+descent": "RTN, then descent",
    "gptq+search+codes": "GPTQ, then descent without new scales",
    "gptq+search+descent": "GPTQ, then descent",
    "gptaq+search+descent": "and the target of GPTAQ",
    "in-turn": "and linears of a layer in sequence",
    "guided": "and tokens weighted by gradients",
    "balanced": "and coupled rows",
    "best": "more passes, and tuned scales",
}
"""Labels of the rows of the four-bit table, in its order."""
EIGHT_BIT = {
    ("FP8_DYNAMIC", "rtn"): "RTN",
    ("FP8_DYNAMIC", "gptq"): "GPTQ",
    ("FP8_BLOCK", "rtn"): "RTN",
    ("INT8_DYNAMIC", "rtn"): "RTN",
    ("INT8_DYNAMIC", "smoothquant"): "SmoothQuant",
}


def main_run() -> Run:
    """Return the run of the quality table."""
    return result_file("quality").run


def average(method: str, scheme: str = FOUR_BIT) -> dict[str, float]:
    """Return the means over seeds of a method, and `spread`, half the range of its KL over seeds."""
    rows = main_run().where(method=method, scheme=scheme)
    if not rows:
        raise LookupError(f"benchmarks/quality.json has no row of {method} in {scheme}")
    keys = ("kl_mean", "kl_p99", "top1", "ppl_ratio", "seconds", "cpu_seconds")
    values = {key: mean(row[key] for row in rows) for key in keys}
    kls = [row["kl_mean"] for row in rows]
    return {**values, "spread": (max(kls) - min(kls)) / 2, "seeds": len(rows)}


def four_bit() -> str:
    """Return the table of methods in the four-bit scheme."""
    found = {name: average(name) for name in LADDER}
    least = min(each["kl_mean"] for each in found.values())
    plain = found["rtn"]["kl_mean"]
    header = [
        "method",
        "mean KL",
        "± seeds",
        "x RTN",
        "p99 KL",
        "top-1",
        "perplexity",
        "s",
        "keys of `quantize`",
    ]
    rows = [
        [
            LADDER[name],
            bold(fixed(each["kl_mean"], 4), each["kl_mean"] == least),
            fixed(each["spread"], 4),
            fixed(each["kl_mean"] / plain, 2),
            fixed(each["kl_p99"], 3),
            fixed(each["top1"], 3),
            f"x {each['ppl_ratio']:.3f}",
            fixed(each["seconds"], 1),
            f"`{recipe_text(METHODS[name])}`",
        ]
        for name, each in found.items()
    ]
    return table(header, rows, align="lrrrrrrrl")


def eight_bit() -> str:
    """Return the table of the eight-bit schemes."""
    header = ["scheme", "method", "mean KL", "± seeds", "p99 KL", "top-1", "perplexity", "s"]
    rows = []
    for (scheme, method), label in EIGHT_BIT.items():
        each = average(method, scheme)
        rows.append(
            [
                f"`{scheme}`",
                label,
                fixed(each["kl_mean"], 4),
                fixed(each["spread"], 4),
                fixed(each["kl_p99"], 3),
                fixed(each["top1"], 3),
                f"x {each['ppl_ratio']:.3f}",
                fixed(each["seconds"], 1),
            ]
        )
    return table(header, rows, align="llrrrrrr")


def recovered_runs() -> list[Run]:
    """Return the runs that train codes, one table each."""
    return result_file("h200/recovery_quantized").runs


def recovered(run: Run) -> str:
    """Return the table of quantized models before and after training, with the control."""
    header = ["scheme", "method", "M tokens", "mean KL", "perplexity ratio", "top-1", "training, s"]
    rows = [
        [
            f"`{row['scheme']}`",
            row["method"] + (" (control)" if row["control"] else ""),
            fixed(row["tokens"] / 1e6, 1) if row["tokens"] else "",
            fixed(row["kl_mean"], 4),
            fixed(row["ppl_ratio"], 3),
            fixed(row["top1"], 3),
            fixed(row["seconds"]["training"]) if "training" in row["seconds"] else "",
        ]
        for row in sorted(run.rows, key=lambda row: (row["scheme"], row["control"], row["tokens"]))
    ]
    return table(header, rows, align="llrrrrr")


def few_bits_runs(name: str) -> list[Run]:
    """Return the runs of a file of few bits."""
    return result_file(name).runs


def few_bits(run: Run) -> str:
    """Return the table of the schemes and methods of a run, means over its seeds."""
    header = ["scheme", "made by", "seeds", "mean KL", "± seeds", "p99 KL", "top-1", "perplexity", "CPU s"]
    rows = []
    for scheme, method in dict.fromkeys((row["scheme"], row["method"]) for row in run.rows):
        found = run.where(scheme=scheme, method=method)
        kls = [row["kl_mean"] for row in found]
        rows.append(
            [
                f"`{scheme}`",
                f"`{recipe_text(METHODS[method])}`",
                fixed(len(found)),
                fixed(mean(kls), 4),
                fixed((max(kls) - min(kls)) / 2, 4) if len(kls) > 1 else "–",
                fixed(mean(row["kl_p99"] for row in found), 3),
                fixed(mean(row["top1"] for row in found), 3),
                f"x {mean(row['ppl_ratio'] for row in found):.3f}",
                fixed(mean(row["cpu_seconds"] for row in found)),
            ]
        )
    return table(header, rows, align="llrrrrrrr")


def peer_runs() -> list[Run]:
    """Return the runs in which other tools and this project were measured, runs with `balanced` first."""
    runs = [
        run
        for run in result_file("quality_peers").runs
        if any(is_ours(row) for row in run.rows) and not all(is_ours(row) for row in run.rows)
    ]
    return sorted(runs, key=lambda run: not run.where(method="balanced"))


def left_out() -> list[Row]:
    """Return the rows of other tools that a note in the file calls broken."""
    return [row for run in result_file("quality_peers").runs for row in run.rows if "note" in row]


def peers(run: Run) -> str:
    """Return the table of one run with other tools, the most accurate row first."""
    header = ["tool", "method", "mean KL", "p99 KL", "top-1", "perplexity", "CPU s"]
    rows = sorted((row for row in run.rows if "note" not in row), key=lambda row: row["kl_mean"])
    body = [
        [
            row["tool"],
            f"`{recipe_text(METHODS[row['method']])}`" if is_ours(row) else row["method"],
            bold(fixed(row["kl_mean"], 4), row is rows[0]),
            fixed(row["kl_p99"], 3),
            fixed(row["top1"], 3),
            f"x {row['ppl_ratio']:.3f}",
            fixed(row["cpu_seconds"]),
        ]
        for row in rows
    ]
    return table(header, body, align="llrrrrr")


def is_ours(row: Row) -> bool:
    """Return whether this project made the row."""
    return bool(row["tool"] == "compress")


def kv_formats() -> str:
    """Return the table of KV cache formats on the model as it is."""
    names = {
        "INT8_TOKEN_HEAD": "`int8`",
        "FP8_TOKEN_HEAD": "`fp8_token_head`",
        "FP8_STATIC": "`fp8`",
        "INT4_TOKEN_HEAD": "`int4`",
    }
    run = result_file("kv").run
    header = ["`kv_cache`", "format", "bytes a token", "mean KL", "interval", "p99 KL", "top-1", "perplexity"]
    rows = []
    for row in sorted(run.where(model="as it is"), key=lambda row: row["kl_mean"]):
        low, high = row["kl_mean_interval"]
        rows.append(
            [
                names.get(row["kv_format"], "left out"),
                f"`{row['kv_format']}`",
                fixed(row["bytes_per_token"]),
                significant(row["kl_mean"], 2),
                f"{significant(low, 2)} .. {significant(high, 2)}",
                significant(row["kl_p99"], 2),
                fixed(row["top1"], 3),
                f"x {row['ppl_ratio']:.3f}",
            ]
        )
    return table(header, rows, align="llrrrrrr")


def kv_hadamard() -> str:
    """Return the table of four-bit caches with and without the Hadamard transform of heads."""
    names = {"INT4_TOKEN_HEAD": "`int4`", "INT4_TOKEN_HEAD_HADAMARD": "`int4_hadamard`"}
    rows = [
        [
            row["model"],
            names[row["kv_format"]],
            significant(row["kl_mean"], 2),
            "{} .. {}".format(*(significant(each, 2) for each in row["kl_mean_interval"])),
            significant(row["kl_p99"], 2),
            fixed(row["top1"], 3),
            f"x {row['ppl_ratio']:.3f}",
        ]
        for row in result_file("kv_hadamard").run.rows
    ]
    header = ["model", "`kv_cache`", "mean KL", "interval", "p99 KL", "top-1", "perplexity"]
    return table(header, rows, align="llrrrrr")


def hadamard_kl(kv_format: str, *, outliers: bool) -> float:
    """Return the mean KL of a four-bit cache, of the model as it is or of the one with an outlier channel."""
    rows = result_file("kv_hadamard").run.where(kv_format=kv_format)
    return float(next(row["kl_mean"] for row in rows if (row["model"] != "as it is") == outliers))


def kv(kv_format: str) -> Row:
    """Return the row of a KV cache format on the model as it is."""
    return result_file("kv").run.one(model="as it is", kv_format=kv_format)


def fp8_attention(kv_format: str) -> Row:
    """Return the row of an e4m3 cache, in one run without and with products in FP8 in prefill attention."""
    return result_file("kv_fp8_attention").run.one(model="as it is", kv_format=kv_format)


def worst_kv() -> Row:
    """Return the row of static scales with the largest KL."""
    return max(result_file("kv").run.where(kv_format="FP8_STATIC"), key=lambda row: row["kl_mean"])


def kv_outliers() -> str:
    """Return the table of one static scale a layer, as the keys of one head grow."""
    run = result_file("kv").run
    rows = []
    for row in run.where(kv_format="FP8_STATIC"):
        other = run.where(model=row["model"], kv_format="FP8_TOKEN_HEAD")
        rows.append(
            [
                row["model"],
                significant(row["error"], 2),
                significant(row["kl_mean"], 2),
                significant(other[0]["kl_mean"], 2) if other else "",
            ]
        )
    header = ["keys", "error of the worst head", "mean KL, `FP8_STATIC`", "mean KL, `FP8_TOKEN_HEAD`"]
    return table(header, rows, align="lrrr")


def recipe_text(settings: Mapping[str, Any]) -> str:
    """Return the keys of `quantize` as they are written in a recipe, without those that repeat a default."""
    kept = {
        key: {name: each for name, each in value.items() if (value["kind"], name, each) not in DEFAULTS}
        if isinstance(value, Mapping)
        else value
        for key, value in settings.items()
    }
    return ", ".join(f"{key}: {_flow(value)}" for key, value in kept.items())


DEFAULTS = {("gptq", "scale", "hessian"), ("rtn", "scale", "min_max")}
"""Kind, key and value of the options that a recipe need not write."""


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(each)}" for key, each in value.items()) + "}"
    return value if isinstance(value, str) else json.dumps(value)
