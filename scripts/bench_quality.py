"""How much accuracy each quantization method keeps: one table over methods and seeds, through the same pipeline that a recipe runs.

    python scripts/bench_quality.py                                       the bundled model and text
    python scripts/bench_quality.py --model ./my-model --data my-eval.yaml --calibration my-text.yaml

Prints the table and writes rows in the schema of `benchmarks/quality.json`: tool, model, method, scheme, kl_mean, kl_p99, top1,
ppl_ratio, seconds, seed. The calibration text is drawn anew for every seed; the evaluation text is the same for all. `seconds` is the
quantize stage alone.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from compress.artifact.context import SilentProgress
from compress.artifact.workspace import Workspace
from compress.cli.run import pick_device
from compress.pipeline import RunOptions, build_steps, resolve_text, run
from compress.recipe import Push, Recipe, SourceMap, StageEntry
from compress.validate.roofline import environment_facts

METHODS: dict[str, dict[str, Any]] = {
    "rtn": {"round": {"kind": "rtn", "scale": "min_max"}},
    "rtn+search": {"round": {"kind": "rtn", "scale": "hessian"}},
    "gptq": {"round": {"kind": "gptq", "scale": "min_max"}},
    "gptq+search": {"round": {"kind": "gptq", "scale": "hessian"}},
    "rtn+search+descent": {"round": {"kind": "rtn", "scale": "hessian"}, "refine": {"kind": "descent"}},
    "gptq+search+codes": {"round": {"kind": "gptq", "scale": "hessian"}, "refine": {"kind": "descent", "refit": False}},
    "awq-scales": {"smooth": {"kind": "awq"}, "round": {"kind": "rtn", "scale": "min_max"}},
    "awq": {"smooth": {"kind": "awq"}, "round": {"kind": "rtn", "scale": "hessian"}},
    "awq+gptq": {"smooth": {"kind": "awq"}, "round": {"kind": "gptq", "scale": "hessian"}},
    "gptq+search+descent": {"round": {"kind": "gptq", "scale": "hessian"}, "refine": {"kind": "descent"}},
    "balanced": {"preset": "balanced"},  # the same towards `target: gptaq`; `preset: fast` is rtn+search
}


W4, FP8 = ("W4A16_G128", "W4A16_G32", "W8A16"), ("FP8_DYNAMIC", "dense")
MIXED: dict[str, dict[str, Any]] = {
    name: {"preset": "balanced", "scheme": {"kind": "mixed", "schemes": schemes, "budget": {"size_ratio": ratio}}}
    for name, schemes, ratio in (
        ("mixed-w4-as-g32", W4, 0.28125),  # the bytes of W4A16_G32
        ("mixed-w4", W4, 0.2965),  # those of W4A16_G128 and 15 % more
        ("mixed-fp8", FP8, 0.75),
    )
}
"""Not among the default methods: they bring schemes of their own, and are to be set beside `balanced` with other `--scheme`s."""


class Quiet:
    """A watch that shows nothing; the table is the output."""

    def stage(self, kind: str, *, cached: bool) -> Any:
        import contextlib

        return contextlib.nullcontext(SilentProgress())


def recipe_of(args: argparse.Namespace, method: str, seed: int) -> Recipe:
    stages = [
        ("calibrate", {"data": args.calibration, "num_samples": args.num_samples, "seq_len": args.seq_len}),
        ("quantize", {"scheme": args.scheme, **(METHODS | MIXED)[method]}),
        ("validate", {"data": args.data, "num_samples": args.eval_samples, "seq_len": args.seq_len, "latency": None}),
    ]
    nowhere = SourceMap(file="bench_quality", positions={})
    entries = tuple(StageEntry(kind, idx, raw, nowhere) for idx, (kind, raw) in enumerate(stages))
    push: Push | None = None
    return Recipe(1, args.model, seed, entries, push, "bench_quality")


def measure(args: argparse.Namespace, method: str, seed: int, workspace: Workspace, device: str) -> dict[str, Any]:
    recipe = recipe_of(args, method, seed)
    result = run(recipe, build_steps(recipe), resolve_text(args.model), workspace, Quiet(), RunOptions(device))
    steps = {each.kind: each for each in result.steps}
    accuracy = json.loads(steps["validate"].artifact.file("report.json").read_text())["accuracy"]
    return {
        "tool": "compress",
        "model": args.model.removeprefix("builtin://"),
        "method": method,
        "scheme": _scheme(args, method),
        "kl_mean": accuracy["kl_mean"]["value"],
        "kl_p99": accuracy["kl_p99"]["value"],
        "top1": accuracy["top1"]["value"],
        "ppl_ratio": accuracy["ppl_ratio"]["value"],
        "seconds": round(steps["quantize"].seconds, 2),
        "seed": seed,
        "num_samples": args.num_samples,
        "seq_len": args.seq_len,
        "eval_tokens": args.eval_samples * args.seq_len,
        "calibration": args.calibration,
        "evaluation": args.data,
    }


def _scheme(args: argparse.Namespace, method: str) -> str:
    if method in METHODS:
        return args.scheme
    mixed = MIXED[method]["scheme"]
    return f"{'/'.join(mixed['schemes'])} at {mixed['budget']['size_ratio']:g}"


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: mean over seeds, spread as half the range, and the ratio to plain rounding."""
    by_method = {method: [row for row in rows if row["method"] == method] for method in METHODS | MIXED}
    base = statistics.mean(row["kl_mean"] for row in by_method["rtn"]) if by_method["rtn"] else None
    lines = ["| method | mean KL | ± seeds | x RTN | p99 KL | top-1 | perplexity ratio | s |", "|---|---|---|---|---|---|---|---|"]
    for method, runs in by_method.items():
        if not runs:
            continue
        kl = [row["kl_mean"] for row in runs]
        mean = {name: statistics.mean(row[name] for row in runs) for name in ("kl_mean", "kl_p99", "top1", "ppl_ratio", "seconds")}
        ratio = f"{mean['kl_mean'] / base:.2f}" if base else ""
        lines.append(
            f"| {method} | {mean['kl_mean']:.5f} | {(max(kl) - min(kl)) / 2:.5f} | {ratio} | {mean['kl_p99']:.4f} | {mean['top1']:.4f} "
            f"| {mean['ppl_ratio']:.4f} | {mean['seconds']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin://reference")
    parser.add_argument("--data", default="builtin://python-eval", help="evaluation text: a data card")
    parser.add_argument("--calibration", default="builtin://python", help="calibration text: a data card")
    parser.add_argument("--scheme", default="W4A16_G128")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS | MIXED))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--num-samples", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--eval-samples", type=int, default=96)
    parser.add_argument("--device", default=None)
    parser.add_argument("--workspace", type=Path, default=None, help="keep stage results here; a temporary directory by default")
    parser.add_argument("--out", type=Path, default=None, help="write the result file here, e.g. benchmarks/quality.json")
    args = parser.parse_args()

    device = pick_device(args.device)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        workspace = Workspace(args.workspace if args.workspace is not None else Path(scratch))
        with workspace.lock():
            for method in args.methods:
                for seed in args.seeds:
                    rows.append(measure(args, method, seed, workspace, device))
                    print(f"{method} seed {seed}: KL {rows[-1]['kl_mean']:.5f} in {rows[-1]['seconds']:.1f} s", file=sys.stderr, flush=True)
    print(table(rows))
    if args.out is not None:
        facts = environment_facts(torch.device(device))
        commit = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
        document = {
            "schema": 1,
            "device": facts["device"],
            "driver": facts.get("driver"),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "commit": commit,
            "date": time.strftime("%Y-%m-%d"),
            "command": " ".join(["python", *sys.argv]),
            "rows": rows,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
