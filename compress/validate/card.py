"""The model card (README.md with Hugging Face front matter) of a compressed artifact, written from its report.

The front matter says what the hub indexes: `base_model`, `base_model_relation` (`quantized`, or `finetune` of a pruned model), the
inherited licence. The text says what a reader must know before loading it: how much accuracy moved and how that is known, what it was
calibrated on, and the exact commands to serve and to measure it again. Numbers come from the report and nowhere else.
"""

from typing import Any

from compress.validate.report import Json, byte_size, label, number, percent


def render_markdown_card(
    report: Json,
    *,
    base_model: str,
    license_id: str,
    serve_command: str,
    eval_command: str,
    language: str | None = None,
) -> str:
    """The card; `license_id` is the base model's, such as `apache-2.0`, and sections whose part the report lacks are left out."""
    relation = "finetune" if "pruning" in report else "quantized"  # the hub has no word for fewer heads
    front: dict[str, Any] = {"base_model": base_model, "base_model_relation": relation, "license": license_id}
    if language:
        front["language"] = language
    front |= {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["compressed"]}
    artifact: Json = report.get("artifact", {})
    sections = [
        _front_matter(front),
        f"# {report['title']}",
        f"A compressed form of `{base_model}`{_scheme(artifact)}.{_pruning(report)}{_size(artifact)} {_verdict(report['verdict'])}",
        *(f"> **Warning.** {warning}" for warning in report.get("warnings", [])),
        *_recovery(report),
        *_latency(report),
        *_speculation(report),
        *_calibration(report),
        f"## Use\n\nServe:\n\n```sh\n{serve_command}\n```\n\nMeasure again:\n\n```sh\n{eval_command}\n```",
    ]
    if digest := artifact.get("digest"):
        sections.append(
            f"These numbers belong to the artifact `{digest}`. The full report, with plots and per-layer errors, is `report.html`."
        )
    return "\n\n".join(sections) + "\n"


def _front_matter(front: Json) -> str:
    """YAML of plain words and lists; a value that could be read as anything else is quoted."""
    lines: list[str] = []
    for name, value in front.items():
        if isinstance(value, list):
            lines += [f"{name}:", *(f"- {_quoted(item)}" for item in value)]
        else:
            lines.append(f"{name}: {_quoted(value)}")
    return "\n".join(["---", *lines, "---"])


def _quoted(value: str) -> str:
    plain = value.replace("-", "").replace("_", "").replace("/", "").replace(".", "")
    if (
        plain.isalnum()
        and value[0].isalpha()
        and value.lower() not in {"yes", "no", "on", "off", "true", "false", "null", "y", "n"}
    ):
        return value
    return "'" + value.replace("'", "''") + "'"


def _scheme(artifact: Json) -> str:
    cache = f" with a KV cache in `{artifact['kv_cache']}`" if artifact.get("kv_cache") else ""
    return (f" in `{artifact['scheme']}`" if artifact.get("scheme") else "") + cache


def _pruning(report: Json) -> str:
    """What went, as far as anything did."""
    if "pruning" not in report:
        return ""
    before = report["pruning"]["before"]
    after = report["pruning"]["after"]
    words = {"heads": "query heads", "kv_heads": "KV heads", "ffn": "FFN channels", "layers": "layers"}
    kept = [
        f"{number(after[name])} of {number(before[name])} {word}"
        for name, word in words.items()
        if after[name] != before[name]
    ]
    return f" Pruned to {', '.join(kept)}: {after['params'] / 1e6:,.1f} of {before['params'] / 1e6:,.1f} million parameters."


def _size(artifact: Json) -> str:
    sizes = artifact.get("sizes")
    if not sizes:
        return ""
    source, candidate = (sum(row[f"{side}_bytes"] for row in sizes) for side in ("source", "candidate"))
    return f" {byte_size(candidate)} instead of {byte_size(source)} ({percent(candidate / source)})."


def _verdict(verdict: Json) -> str:
    if verdict["passed"] is None:
        return "No gate was set for it."
    if verdict["passed"]:
        return f"Every gate of its recipe holds ({verdict['num_decided']} of {verdict['num_decided']})."
    return "**It failed its gates:** " + " ".join(verdict["reasons"])


def _recovery(report: Json) -> list[str]:
    accuracy = report.get("accuracy")
    if accuracy is None:
        return []
    rows = [
        [
            "Perplexity",
            number(accuracy["ppl_source"]["value"], 5),
            number(accuracy["ppl_candidate"]["value"], 5),
            _interval(accuracy["ppl_ratio"], 5, "× "),
        ],
        [
            "Bits per byte",
            number(accuracy["bits_per_byte_source"]["value"], 4),
            number(accuracy["bits_per_byte"]["value"], 4),
            "",
        ],
        [
            "KL to the source, mean",
            "0",
            number(accuracy["kl_mean"]["value"]),
            _interval(accuracy["kl_mean"], 3),
        ],
        ["KL to the source, p99", "0", number(accuracy["kl_p99"]["value"]), _interval(accuracy["kl_p99"], 3)],
        ["Same top token", "100 %", percent(accuracy["top1"]["value"], 2), _interval(accuracy["top1"], 4)],
    ]
    note = (
        f"{number(accuracy['num_tokens'])} tokens in {number(accuracy['num_windows'])} windows of {number(accuracy['window_size'])}; "
        f"perplexity convention {accuracy['convention']}; intervals at {percent(accuracy['confidence'], 0)}, over windows."
    )
    return ["## Recovery", _table(["", "source", "this model", "change or interval"], rows), note]


def _speculation(report: Json) -> list[str]:
    """One row a proposer, at the first temperature and batch size; the acceptance length is over all prompts."""
    speculation = report.get("speculation")
    if speculation is None:
        return []
    first = speculation["speed"][0]
    lengths = {(row["proposer"], row["temperature"]): row for row in reversed(speculation["acceptance"])}
    rows = []
    for speed in speculation["speed"]:
        if (speed["temperature"], speed["batch_size"]) == (first["temperature"], first["batch_size"]):
            found = lengths[speed["proposer"], speed["temperature"]]
            interval = (
                f"[{number(found['acceptance_length_lower'])}, {number(found['acceptance_length_upper'])}]"
            )
            kept = " ".join(percent(rate, 0) for rate in found["acceptance_rates"])
            rows.append(
                [
                    speed["proposer"],
                    f"{number(found['acceptance_length'])} {interval}",
                    kept,
                    f"× {number(speed['speedup'])}",
                ]
            )
    note = (
        f"{speculation['k']} tokens proposed a step, temperature {first['temperature']:g}, batch {first['batch_size']}, prompts from "
        f"{', '.join(speculation['data'])}. {speculation['num_equal']} of {speculation['num_compared']} continuations that must be "
        "those of plain decoding are."
    )
    return [
        "## Speculation",
        _table(["proposer", "tokens a step", "kept, by position", "speed-up"], rows),
        note,
    ]


def _latency(report: Json) -> list[str]:
    latency = report.get("latency", {})
    if "candidate" not in latency:
        return []
    sides = {side: {row["batch_size"]: row for row in rows} for side, rows in latency.items()}
    rows = []
    for batch_size, row in sides["candidate"].items():
        source = sides.get("source", {}).get(batch_size)
        before = number(source["tpot_ms_p50"]) if source else "–"
        rows.append(
            [
                str(batch_size),
                number(row["ttft_ms_p50"]),
                before,
                number(row["tpot_ms_p50"]),
                number(row["tpot_ms_p95"]),
                percent(row["floor_frac"], 0),
            ]
        )
    first = latency["candidate"][0]
    device = report.get("environment", {}).get("device", "this device")
    note = (
        f"Bundled runtime on {device}, {number(first['prompt_tokens'])} prompt and {number(first['output_tokens'])} output tokens, "
        f"milliseconds, prefix cache {first['prefix_cache']}."
    )
    head = ["batch", "TTFT p50", "TPOT p50, source", "TPOT p50", "TPOT p95", "share of the floor"]
    return ["## Latency", _table(head, rows), note]


def _calibration(report: Json) -> list[str]:
    calibration = report.get("calibration")
    if not calibration:
        return []
    lines = [
        f"- {label(name)}: {number(value) if isinstance(value, int) else value}"
        for name, value in calibration.items()
        if value is not None
    ]
    return ["## Calibration data", "\n".join(lines)]


def _interval(estimate: Json, digits: int, prefix: str = "") -> str:
    value = f"{prefix}{number(estimate['value'], digits)} " if prefix else ""
    return f"{value}[{number(estimate['lower'], digits)}, {number(estimate['upper'], digits)}]"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
