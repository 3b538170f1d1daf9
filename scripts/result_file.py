r"""The latency rows of a validation report as a result file, the form in which runtimes are compared.

    python -m scripts.result_file runs/quickstart/evidence/report.json benchmarks/h200/runtime.json \
        --shape reference-17m

One row a side and batch size: tool, shape, scheme, kv, tp, batch_size, prompt_tokens, output_tokens,
ttft_ms_p50/p95, tpot_ms_p50/p95/p99, floor_ms, floor_frac, and the kernels that served decode.
"""

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

MEASURED = (
    *("batch_size", "prompt_tokens", "output_tokens"),
    *("ttft_ms_p50", "ttft_ms_p95", "tpot_ms_p50", "tpot_ms_p95", "tpot_ms_p99", "floor_ms", "floor_frac"),
)


def runtime_rows(report: dict[str, Any], shape: str) -> list[dict[str, Any]]:
    """Source first. Keys and values, and the source's weights, have the dtype that attention computes in."""
    dtype = next(row["scheme"] for row in report["kernels"] if row["op"] == "attention_decode")
    schemes = {"source": dtype, "candidate": report["artifact"]["scheme"] or dtype}
    return [
        {
            "tool": "compress",
            "shape": shape,
            "scheme": schemes[side],
            "kv": dtype.lower(),
            "tp": 1,
            **{name: row[name] for name in MEASURED},
            **({"kernels": decode_kernels(report)} if side == "candidate" else {}),
        }
        for side, rows in report["latency"].items()
        for row in rows
    ]


def decode_kernels(report: dict[str, Any]) -> list[str]:
    return sorted({f"{row['op']}: {row['kernel']}" for row in report["kernels"] if row["phase"] == "decode"})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--shape", default=None, help="name of the model's shape; the source's name by default"
    )
    parser.add_argument(
        "--commit", default=None, help="of the code that was measured; the checkout's by default"
    )
    args = parser.parse_args()

    report = json.loads(args.report.read_text(encoding="utf-8"))
    environment = report["environment"]
    head = ["git", "rev-parse", "--verify", "HEAD"]
    document = {
        "schema": 1,
        "device": environment["device"],
        "driver": environment.get("driver"),
        "versions": {"python": environment["python"], "torch": environment["torch"]},
        "commit": args.commit
        or subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip(),
        "date": time.strftime("%Y-%m-%d", time.localtime(args.report.stat().st_mtime)),
        "command": f"compress validate, report of {report['title']}",
        "rows": runtime_rows(report, args.shape or report["artifact"]["source"]),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
