r"""What each way to choose FFN channels keeps of a model, at one budget: one table over scores, compensations
and seeds.

    python -m scripts.bench_pruning                           a quarter of the FFN, the bundled model and text
    python -m scripts.bench_pruning --heads 0.75 --ffn 0.75 --methods obs+least_squares taylor
    python -m scripts.bench_pruning --model ./my-model --data my-eval.yaml --calibration my-text.yaml \
        --device cuda --out pruning.json

A method is a score and, behind a plus, a compensation. Prints the table and writes rows: experiment
(`scores`), tool, model, method, heads_keep, ffn_keep, params_frac, rounds, kl_mean, kl_interval, kl_p99,
top1, ppl_ratio, bpb_source, bpb_pruned, seconds, device, seed. The calibration text is drawn anew for every
seed, and is the same for all methods; the evaluation text is the same for all. `seconds` is the pruning
alone, with writing its result. With `--out` (`benchmarks/pruning.json`) every row is written as soon as it is
measured, beside the rows of other experiments, and `--resume` keeps those that the file has.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from compress.artifact.manifest import open_artifact
from compress.artifact.workspace import Workspace
from compress.machine import environment_facts
from compress.pipeline import pick_device, resolve_source
from compress.recipe import Recipe, SourceMap, StageEntry
from scripts.bench_quality import document
from scripts.bench_setup import markdown
from scripts.quality_bench.measure import Setting, run_until, score

METHODS = (
    *("random", "activation", "wanda", "flap", "taylor", "obs"),
    *("random+least_squares", "activation+least_squares", "taylor+least_squares", "obs+least_squares"),
)
EXPERIMENT = "scores"


def recipe(setting: Setting, method: str, keep: dict[str, float], rounds: int, seed: int) -> Recipe:
    named, _, compensate = method.partition("+")
    cuts = {axis: {"keep": share} for axis, share in keep.items() if share < 1}
    stages = [
        (
            "calibrate",
            {"data": setting.calibration, "num_samples": setting.num_samples, "seq_len": setting.seq_len},
        ),
        ("prune", {**cuts, "score": named, "compensate": compensate or "none", "rounds": rounds}),
    ]
    nowhere = SourceMap(file="bench_pruning", positions={})
    return Recipe(
        1,
        setting.model,
        seed,
        tuple(StageEntry(kind, idx, raw, nowhere) for idx, (kind, raw) in enumerate(stages)),
        None,
        "",
    )


def measure(
    setting: Setting, method: str, keep: dict[str, float], rounds: int, seed: int, workspace: Workspace
) -> dict[str, Any]:
    asked = recipe(setting, method, keep, rounds, seed)
    run_until(setting, asked, workspace, until="calibrate")
    pruned = run_until(setting, asked, workspace, until="prune")
    facts = open_artifact(pruned.artifact.path).manifest.facts["pruning"]
    accuracy = score(setting, resolve_source(setting.model), pruned.artifact.path)
    kl = accuracy["kl_mean"]
    return {
        "experiment": EXPERIMENT,
        "tool": "compress",
        "model": setting.model.removeprefix("builtin://"),
        "method": method,
        "heads_keep": facts["after"]["heads"] / facts["before"]["heads"],
        "ffn_keep": facts["after"]["ffn"] / facts["before"]["ffn"],
        "params_frac": round(facts["after"]["params"] / facts["before"]["params"], 6),
        "rounds": rounds,
        "kl_mean": kl["value"],
        "kl_interval": [kl["lower"], kl["upper"]],
        "kl_p99": accuracy["kl_p99"]["value"],
        "top1": accuracy["top1"]["value"],
        "ppl_ratio": accuracy["ppl_ratio"]["value"],
        "bpb_source": accuracy["bits_per_byte_source"]["value"],
        "bpb_pruned": accuracy["bits_per_byte"]["value"],
        "seconds": round(pruned.seconds, 2),
        "device": environment_facts(torch.device(setting.device))["device"],
        "seed": seed,
        **setting.facts(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Means over seeds, and how far apart seeds are, by falling KL."""
    by_method: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row)

    def mean(method: str, name: str) -> float:
        return statistics.fmean(row[name] for row in by_method[method])

    header = (
        "method",
        "mean KL",
        "least .. most of seeds",
        "bits per byte",
        "perplexity ratio",
        "top-1",
        "seconds",
        "seeds",
    )
    body = []
    for method in sorted(by_method, key=lambda each: -mean(each, "kl_mean")):
        kls = [row["kl_mean"] for row in by_method[method]]
        shown = (mean(method, "bpb_pruned"), mean(method, "ppl_ratio"), mean(method, "top1"))
        numbers = [f"{each:.4f}" for each in shown]
        spread = f"{min(kls):.4f} .. {max(kls):.4f}"
        body.append(
            (
                method,
                f"{mean(method, 'kl_mean'):.4f}",
                spread,
                *numbers,
                f"{mean(method, 'seconds'):.1f}",
                str(len(kls)),
            )
        )
    first = rows[0]
    kept = (
        f"heads x {first['heads_keep']:g}, FFN x {first['ffn_keep']:g}, "
        f"parameters x {first['params_frac']:.3f}"
    )
    return (
        f"{first['model']}, {kept}; source {first['bpb_source']:.4f} bits per byte\n\n"
        f"{markdown(header, body)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin://reference")
    parser.add_argument("--data", default="builtin://python-eval", help="evaluation text: a data card")
    parser.add_argument("--calibration", default="builtin://python", help="calibration text: a data card")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="score, or score+compensation")
    parser.add_argument("--heads", type=float, default=1.0, help="share of the heads that stays")
    parser.add_argument("--ffn", type=float, default=0.75, help="share of the FFN channels that stays")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--num-samples", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--eval-samples", type=int, default=96)
    parser.add_argument("--device", default=None)
    parser.add_argument(
        "--out", type=Path, default=None, help="write the result file here, e.g. benchmarks/pruning.json"
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out holds already")
    args = parser.parse_args()
    device = pick_device(args.device)
    setting = Setting(
        args.model, args.calibration, args.data, args.num_samples, args.seq_len, args.eval_samples, device
    )
    kept: list[dict[str, Any]] = (
        json.loads(args.out.read_text())["rows"] if args.out is not None and args.out.exists() else []
    )
    others = [row for row in kept if row["experiment"] != EXPERIMENT]  # the file holds other experiments too
    rows = [row for row in kept if row["experiment"] == EXPERIMENT and args.resume]
    known = {(row["method"], row["seed"]) for row in rows}
    with tempfile.TemporaryDirectory() as scratch:
        workspace = Workspace(Path(scratch))
        with workspace.lock():
            for method, seed in (
                (method, seed)
                for seed in args.seeds
                for method in args.methods
                if (method, seed) not in known
            ):
                rows.append(
                    measure(
                        setting, method, {"heads": args.heads, "ffn": args.ffn}, args.rounds, seed, workspace
                    )
                )
                print(
                    f"{method} {seed}: KL {rows[-1]['kl_mean']:.5f} in {rows[-1]['seconds']:.1f} s",
                    file=sys.stderr,
                    flush=True,
                )
                if args.out is not None:
                    args.out.parent.mkdir(parents=True, exist_ok=True)
                    args.out.write_text(json.dumps(document(device, others + rows), indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
