"""How much of a quantized model comes back by training its codes and scales, beside plain fine-tuning on the
same tokens.

    python -m scripts.bench_recovery_quantized --data TEXT_DIR --out benchmarks/h200/recovery_quantized.json
        every scheme, 60 M tokens each, one GPU
    python -m scripts.bench_recovery_quantized --schemes W2A16_G64 --tokens 2e6 --variants codes lora

For each scheme: quantize the bundled model (`--start`, a method of `scripts/quality_bench/methods.py`), train
codes and scales against the source as the stage `recover` does (`codes`; `lora`: low-rank terms merged before
rounding), and measure as `bench_quality` does: `--eval-data` through the serving forward. The control
(`finetune`) trains the source's own dense weights on the same windows in the same order with the text's next
tokens as its only teacher, and rounds the result by the same method on the same calibration text; one
training serves all schemes. It is measured against the source, too.

TEXT is a data card, or a directory as `train_reference.py` reads it (see `bench_recovery.py`). It is encoded
once into `--work`, cut into windows, and shuffled; windows are repeated where there are too few for
`--tokens`. Evaluation text is never trained on.

A row: scheme, method (`balanced`; `balanced + codes`; `finetune + balanced`), control (whether it is the
control), tokens, kl_mean with its interval, kl_p99, top1, ppl_ratio, seconds (of the training and of the
quantizing), curve of the training [{tokens, kl, bits_per_byte}] on held-out windows of the training text,
settings. Rows are written as soon as they are measured, and replace rows of the same scheme and method.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from compress.artifact.manifest import open_artifact
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from compress.context import Context
from compress.data.tokens import TokenSet
from compress.distill.losses import next_token
from compress.distill.train import TrainConfig, Training, Windows
from compress.export import open_weights
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.weights import MemorySource, build_decoder
from compress.pipeline import resolve_source
from compress.registry.model_source import ModelSource
from compress.stages.distill.text import TrainingText
from compress.stages.recover.spec import Recover
from compress.stages.recover.training import recovery_facts, train_codes
from scripts.bench_recovery import read_text
from scripts.bench_setup import markdown, pick_device, write_results
from scripts.quality_bench.measure import Setting, run_until, score
from scripts.quality_bench.methods import METHODS
from scripts.train_reference import encode

SCHEMES = ("W4A16_G128", "W3A16_G128", "W2A16_G64", "NVFP4", "MXFP4")
VARIANTS = ("codes", "lora", "finetune")
SEED = 0
ALSO = {"W4A16_G128": ("gptq", "best")}
"""Scheme -> methods that are measured beside the start, to compare with."""
HELD_OUT = 16
"""Windows of the training text that the curve is measured on."""


class Bench:
    """What all rows share: the model, the text, a workspace for results of stages, and one for those of this
    run alone."""

    def __init__(self, args: argparse.Namespace, workspace: Workspace, trained: Workspace) -> None:
        self.args = args
        self.workspace = workspace
        self.trained = trained
        self.device = pick_device() if args.device is None else torch.device(args.device)
        self.source: ModelSource = resolve_source(args.model)
        self.setting = Setting(
            args.model,
            args.calibration,
            args.eval_data,
            args.num_samples,
            args.calibration_len,
            args.eval_samples,
            str(self.device),
        )
        self.text = training_text(args, self.source)

    def spec(self, *, lora: bool) -> Recover:
        """Settings of the training, as a recipe states them."""
        args = self.args
        lr = args.lora_lr if lora else args.lr
        num_windows = len(self.text.training.tokens_NS)
        passes = -(-int(args.tokens) // (num_windows * args.seq_len))
        return Recover.model_validate(
            {
                "tokens": int(args.tokens),
                "passes": passes,
                "seq_len": args.seq_len,
                "batch_size": args.batch_size,
                "micro_batch_size": min(args.batch_size, args.micro_batch_size),
                "lr": lr,
                "scale_lr": args.scale_lr,
                "optimizer": args.optimizer,
                "warmup_frac": args.warmup_frac,
                "loss": {
                    "kind": args.loss,
                    "temperature": args.temperature,
                    "hard_frac": args.hard_frac,
                },
                "eval_samples": HELD_OUT,
                "compute_dtype": "bfloat16" if args.bfloat16 else "auto",
                "compile": args.compile,
                **({"lora": {"rank": args.lora_rank}} if lora else {}),
            }
        )

    def quantized(self, setting: Setting, scheme: str, method: str) -> tuple[Path, float]:
        """The artifact of the quantize stage, and its seconds."""
        step = run_until(setting, setting.recipe(method, scheme, SEED), self.workspace, until="quantize")
        return step.artifact.path, step.seconds

    def scored(self, path: Path) -> dict[str, Any]:
        """The accuracy of an artifact beside the source's."""
        found = score(self.setting, self.source, path)
        kl = found["kl_mean"]
        return {
            "kl_mean": kl["value"],
            "kl_interval": [kl["lower"], kl["upper"]],
            "kl_p99": found["kl_p99"]["value"],
            "top1": found["top1"]["value"],
            "ppl_ratio": found["ppl_ratio"]["value"],
        }


def training_text(args: argparse.Namespace, source: ModelSource) -> TrainingText:
    """Windows of all training text, shuffled, the first of them held out; the ids are kept in the work
    directory."""
    name = args.data.replace("/", "_").replace(":", "_")
    file = args.work / f"recovery-quantized-{name}.npy"
    if not file.exists():
        tokenizer = Tokenizer.from_file(str(source.path / "tokenizer.json"))
        args.work.mkdir(parents=True, exist_ok=True)
        np.save(file, encode(tokenizer, read_text(args.data)[0], seed=SEED))
    stream = torch.from_numpy(np.load(file).astype(np.int32))
    span = args.seq_len + 1
    windows_NS = stream[: stream.numel() // span * span].view(-1, span)
    order = torch.randperm(len(windows_NS), generator=torch.Generator().manual_seed(SEED))
    most = HELD_OUT + max(args.batch_size, int(args.tokens) // args.seq_len)
    windows_NS = windows_NS[order[:most]]
    training = TokenSet(windows_NS[HELD_OUT:].contiguous(), 0, 0, {})
    held_out_NS = windows_NS[:HELD_OUT].contiguous()
    return TrainingText(training, held_out_NS, held_out_NS.numel())


def codes_row(bench: Bench, scheme: str, variant: str) -> dict[str, Any]:
    """The quantized model after training its codes and scales."""
    start, quantize_s = bench.quantized(bench.setting, scheme, bench.args.start)
    torch.compiler.reset()  # graphs of the schemes before; beyond a handful of them nothing more is compiled
    spec = bench.spec(lora=variant == "lora")
    key = f"{scheme}-{variant}"
    ctx = Context(str(bench.device), SEED, bench.trained.scratch(key))
    started_s = time.perf_counter()
    recovered = train_codes(
        spec,
        open_weights(bench.source.path),
        open_weights(start),
        bench.text,
        ctx,
        digest=bench.source.digest,
    )
    seconds = time.perf_counter() - started_s

    def write(out: ArtifactWriter) -> None:
        recovered.write(out)
        stated = open_artifact(start).manifest
        out.describe(role="quantized", arch=stated.arch, layers=stated.layers, scheme=stated.scheme)

    path = bench.trained.commit(key, "recover", {}, write).path
    keys = ("lr", "scale_lr", "batch_size", "seq_len", "passes", "optimizer", "warmup_frac")
    return {
        "tokens": recovered.measured[-1]["tokens"],
        **bench.scored(path),
        "seconds": {"quantize": round(quantize_s, 1), "training": round(seconds, 1)},
        "settings": {
            **{key: getattr(spec, key) for key in keys},
            "loss": spec.loss.model_dump(mode="json"),
            "trained": recovery_facts(spec, recovered, {})["trained"],
        },
        "curve": [
            {"tokens": row["tokens"], "kl": row["kl"], "bits_per_token": row["bits_per_byte"]}
            for row in recovered.measured
        ],
    }


def finetuned(bench: Bench, work: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of the source after training its dense weights on the text, with facts."""
    args = bench.args
    spec = bench.spec(lora=False)
    dtype = spec.computes_in(bench.device)
    model = build_decoder(open_weights(bench.source.path), dtype=torch.float32, device=bench.device)
    model.requires_grad_(True)
    windows = Windows(bench.text.training.tokens_NS, batch_size=args.batch_size, seed=SEED)
    config = TrainConfig(
        spec.num_steps,
        args.batch_size,
        spec.micro_batch,
        args.finetune_lr,
        warmup_frac=args.warmup_frac,
        weight_decay=0.0,
        compute_dtype=dtype,
        log_every=max(1, spec.num_steps // 10),
        compile=args.compile,
    )
    started_s = time.perf_counter()
    rows = list(Training(model, next_token, windows.batch, config, device=bench.device).rows())
    work.mkdir(parents=True, exist_ok=True)
    write_checkpoint(work, MemorySource(model, dtype=torch.bfloat16))
    for file in bench.source.path.glob("token*.json"):
        shutil.copyfile(file, work / file.name)
    return work, {
        "tokens": rows[-1].num_tokens,
        "seconds": round(time.perf_counter() - started_s, 1),
        "settings": {"lr": args.finetune_lr, "batch_size": args.batch_size, "seq_len": args.seq_len},
        "curve": [{"tokens": row.num_tokens, "loss": row.loss} for row in rows],
    }


def finetune_rows(bench: Bench, work: Path) -> Callable[[str], dict[str, Any]]:
    """scheme -> the row of the control; the training runs when the first row is wanted."""
    trained: list[tuple[Path, dict[str, Any]]] = []

    def row(scheme: str) -> dict[str, Any]:
        if not trained:
            trained.append(finetuned(bench, work))
        path, facts = trained[0]
        setting = Setting(**{**vars(bench.setting), "model": str(path)})
        quantized, quantize_s = bench.quantized(setting, scheme, bench.args.start)
        seconds = {"quantize": round(quantize_s, 1), "training": facts["seconds"]}
        return {**facts, **bench.scored(quantized), "seconds": seconds}

    return row


def rows_of(bench: Bench, work: Path) -> Iterator[dict[str, Any]]:
    """Every row, as it is measured."""
    start = bench.args.start
    control = finetune_rows(bench, work / "finetuned")
    for scheme in bench.args.schemes:
        methods = (start, *(ALSO.get(scheme, ()) if not bench.args.start_only else ()))
        for method in dict.fromkeys(methods):
            path, seconds = bench.quantized(bench.setting, scheme, method)
            yield {
                **identity(scheme, method, control=False),
                "tokens": 0,
                **bench.scored(path),
                "seconds": {"quantize": round(seconds, 1)},
            }
        for variant in bench.args.variants:
            if variant == "finetune":
                yield {**identity(scheme, f"finetune + {start}", control=True), **control(scheme)}
            else:
                name = f"{start} + {variant}"
                yield {**identity(scheme, name, control=False), **codes_row(bench, scheme, variant)}


def identity(scheme: str, method: str, *, control: bool) -> dict[str, Any]:
    return {"tool": "compress", "scheme": scheme, "method": method, "control": control}


def table(rows: list[dict[str, Any]]) -> str:
    header = ["scheme", "method", "M tokens", "KL", "perplexity ratio", "top-1", "s"]
    return markdown(
        header,
        [
            [
                row["scheme"],
                row["method"] + (" (control)" if row["control"] else ""),
                f"{row['tokens'] / 1e6:.2f}",
                f"{row['kl_mean']:.5f}",
                f"{row['ppl_ratio']:.4f}",
                f"{row['top1']:.4f}",
                f"{sum(row['seconds'].values()):.0f}",
            ]
            for row in rows
        ],
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="builtin://reference")
    add("--data", default="builtin://python", help="training text: a data card, or a directory of *.jsonl.xz")
    add("--schemes", nargs="+", default=list(SCHEMES))
    add("--variants", nargs="*", default=["codes", "finetune"], choices=VARIANTS)
    add("--start", default="balanced", choices=list(METHODS), help="the method that training starts from")
    add("--start-only", action="store_true", help="measure no other method beside it")
    add("--tokens", type=float, default=60e6, help="of training, for each row")
    add("--seq-len", type=int, default=512, help="of a window of training")
    add("--batch-size", type=int, default=64, help="windows a step")
    add("--micro-batch-size", type=int, default=1 << 16, help="windows computed at once; all by default")
    add("--lr", type=float, default=1e-2, help="of codes, in steps of the grid")
    add("--scale-lr", type=float, default=5e-4, help="of scales, relative")
    add("--lora-lr", type=float, default=4e-3, help="of low-rank terms, in the same unit")
    add("--lora-rank", type=int, default=32)
    add("--finetune-lr", type=float, default=1e-4, help="of the control")
    add("--optimizer", default="adamw", choices=["adamw", "muon"])
    add("--warmup-frac", type=float, default=0.05)
    add("--loss", default="forward_kl", choices=["forward_kl", "reverse_kl", "js"])
    add("--temperature", type=float, default=1.0)
    add("--hard-frac", type=float, default=0.0, help="share of the text's own next token in the loss")
    add("--eval-data", default="builtin://python-eval", help="evaluation text: a data card")
    add("--eval-samples", type=int, default=96)
    add("--calibration", default="builtin://python", help="calibration text: a data card")
    add("--num-samples", type=int, default=128, help="calibration samples")
    add("--calibration-len", type=int, default=512, help="tokens of a sample of calibration and evaluation")
    add("--bfloat16", action="store_true", help="compute in bfloat16 on a CPU, too")
    add("--compile", action="store_true", help="compile the models")
    add("--device", default=None)
    add(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "bench-recovery",
        help="encoded text is kept here",
    )
    add("--workspace", type=Path, default=None, help="keep what quantizing leaves here")
    add("--commit", default=None)
    add("--out", type=Path, default=None, help="write the result file here, beside rows that it has")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    known = json.loads(args.out.read_text())["rows"] if args.out is not None and args.out.exists() else []
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as scratch:
        trained = Workspace(Path(scratch) / "trained")
        workspace = Workspace(args.workspace or Path(scratch) / "workspace")
        with workspace.lock(), trained.lock():
            bench = Bench(args, workspace, trained)
            num_tokens = bench.text.training.tokens_NS.numel()
            print(f"{num_tokens / 1e6:.1f} M different training tokens", file=sys.stderr, flush=True)
            for row in rows_of(bench, Path(scratch)):
                rows.append(row)
                print(table([row]).splitlines()[-1], file=sys.stderr, flush=True)
                if args.out is not None:
                    new = {(each["scheme"], each["method"]) for each in rows}
                    others = [each for each in known if (each["scheme"], each["method"]) not in new]
                    facts = {"data": args.data, "start": args.start}
                    write_results(
                        args.out, [*others, *rows], device=bench.device, commit=args.commit, facts=facts
                    )
    print(table(rows))


if __name__ == "__main__":
    main()
