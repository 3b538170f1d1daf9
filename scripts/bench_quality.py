"""How much accuracy each quantization method keeps: one table over methods, schemes and seeds, through the
pipeline that a recipe runs.

    python -m scripts.bench_quality                                     W4A16_G128, the bundled model and text
    python -m scripts.bench_quality --schemes all                       every scheme
    python -m scripts.bench_quality --model ./my-model --data my-eval.yaml --calibration my-text.yaml
    python -m scripts.bench_quality --methods balanced --peers .venv-peers --device cpu
        beside other tools, see install_peers.py

Prints the table and writes rows in the schema of `benchmarks/quality.json`: tool, model, method, scheme,
kl_mean, kl_interval, kl_p99, top1, ppl_ratio, seconds, cpu_seconds, threads, seed. The calibration text is
drawn anew for every seed, and is the same for all tools; the evaluation text is the same for all. `seconds`
is the quantizing alone. With `--out` every row is written as soon as it is measured, and `--resume` keeps
those that the file has.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from compress.artifact.workspace import Workspace
from compress.machine import environment_facts
from compress.pipeline import pick_device
from scripts.peer_quantize import TOOLS
from scripts.quality_bench.measure import Setting, measure, measure_peer
from scripts.quality_bench.methods import METHODS, SUITE
from scripts.quality_bench.table import beside_peers, table

Measurement = tuple[tuple[str, str, str, int], Callable[[], dict[str, Any]]]
"""(tool, scheme, method, seed) of a row, and what measures it."""


def measurements(args: argparse.Namespace, setting: Setting, workspace: Workspace) -> Iterator[Measurement]:
    """This project's rows first; slow tools with the first seed only."""
    for scheme in list(SUITE) if args.schemes == ["all"] else args.schemes:
        for method in args.methods or SUITE[scheme]:
            for seed in args.seeds:
                yield (
                    ("compress", scheme, method, seed),
                    lambda s=scheme, m=method, n=seed: measure(setting, m, s, n, workspace),
                )
    if args.peers is None:
        return
    python = args.peers / "bin" / "python"
    for name in args.tools:
        tool = TOOLS[name]
        for seed in args.seeds[:1] if tool.slow else args.seeds:
            yield (
                (tool.package, tool.scheme, tool.method, seed),
                lambda t=name, n=seed: measure_peer(setting, t, n, workspace, python),
            )


def document(device: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    facts = environment_facts(torch.device(device))
    head = ["git", "rev-parse", "--verify", "HEAD"]
    return {
        "schema": 1,
        "device": facts["device"],
        "driver": facts.get("driver"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
        "rows": rows,
    }


def identity(row: dict[str, Any]) -> tuple[str, str, str, int]:
    return row["tool"].partition(" ")[0], row["scheme"], row["method"], row["seed"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin://reference")
    parser.add_argument("--data", default="builtin://python-eval", help="evaluation text: a data card")
    parser.add_argument("--calibration", default="builtin://python", help="calibration text: a data card")
    parser.add_argument("--schemes", nargs="+", default=["W4A16_G128"], choices=[*SUITE, "all"])
    parser.add_argument(
        "--methods",
        nargs="+",
        default=None,
        choices=list(METHODS),
        help="by default those that the scheme is measured with",
    )
    parser.add_argument(
        "--peers",
        type=Path,
        default=None,
        help="virtual environment of other tools, made by scripts/install_peers.py",
    )
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=list(TOOLS), help="which of them")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--num-samples", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--eval-samples", type=int, default=96)
    parser.add_argument("--device", default=None)
    parser.add_argument(
        "--workspace",
        type=Path,
        default=None,
        help="keep stage results here; a temporary directory by default",
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="write the result file here, e.g. benchmarks/quality.json"
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out holds already")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    device = pick_device(args.device)
    setting = Setting(
        args.model, args.calibration, args.data, args.num_samples, args.seq_len, args.eval_samples, device
    )
    rows: list[dict[str, Any]] = (
        json.loads(args.out.read_text())["rows"] if args.resume and args.out.exists() else []
    )
    known = {identity(row) for row in rows}
    with tempfile.TemporaryDirectory() as scratch:
        workspace = Workspace(args.workspace if args.workspace is not None else Path(scratch))
        with workspace.lock():
            for key, measured in measurements(args, setting, workspace):
                if key in known:
                    continue
                rows.append(measured())
                row = rows[-1]
                print(
                    f"{' '.join(map(str, key))}: KL {row['kl_mean']:.5f} in {row['seconds']:.1f} s",
                    file=sys.stderr,
                    flush=True,
                )
                if args.out is not None:
                    args.out.parent.mkdir(parents=True, exist_ok=True)
                    args.out.write_text(json.dumps(document(device, rows), indent=1) + "\n")
    print(table(rows))
    print(*beside_peers(rows), sep="\n")


if __name__ == "__main__":
    main()
