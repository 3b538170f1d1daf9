"""How much of a pruned model comes back, and how it compares with the same shape trained from scratch on the
same tokens.

    python -m scripts.bench_recovery --data TEXT_DIR --out benchmarks/h200/recovery.json
        both experiments, one GPU
    python -m scripts.bench_recovery --data my-text.yaml --experiments prune25+recover --tokens 20e6

Experiments: `prune25+recover` (a quarter of the KV groups with their heads, a quarter of the FFN),
`heads30+ffn20` (30 % of the heads, 20 % of the FFN, nearest legal numbers with widths a multiple of 64). For
each: prune (the prune stage; `--score`, `--compensate`), measure, recover by distillation from the source,
and train the pruned shape from fresh weights on the text itself, with the same windows in the same order.

TEXT_DIR is a directory as `train_reference.py` reads it (`*.jsonl.xz`; the running Python's standard library
is added, and the documents that the reference model was never trained on are held out); a data card is split
by the same rule. Bits per byte are those of `train_reference.py`: stored bfloat16 weights, float32
activations, windows of 1,024 without overlap, every source of text, total bits over total bytes. The curve is
measured on the weights in training.

A row: experiment, model, params and widths before and after, bpb_source, bpb_pruned, bpb_recovered,
bpb_scratch (and each by source of text), ratio (recovered over source), tokens, seconds, curve [{tokens,
bpb_recovered, bpb_scratch}], settings.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from compress.artifact.workspace import Workspace
from compress.context import Context
from compress.data.card import documents, load_card
from compress.data.corpus import Document
from compress.data.model_tokens import TOKENS_NAME
from compress.data.tokens import TokenSet, save_token_set
from compress.distill.losses import Divergence, next_token
from compress.distill.objective import Objective, Teacher
from compress.distill.train import TokenStream, TrainConfig, Training
from compress.export import open_weights
from compress.models.arch import Arch
from compress.models.decoder import Decoder
from compress.models.initialise import fresh_decoder
from compress.models.weights import MemorySource, WeightSource, build_decoder
from compress.registry.model_source import resolve_model
from compress.stages import Input, Inputs, Port
from compress.stages.prune import prune
from compress.stages.prune.spec import Prune
from scripts.bench_setup import markdown, pick_device, write_results
from scripts.train_reference import SEQ_LEN, collect, encode, held_out

SEED = 0
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "prune25+recover": {"heads": {"keep": 0.75}, "ffn": {"keep": 0.75}},
    "heads30+ffn20": {"heads": {"keep": 0.7}, "ffn": {"keep": 0.8}, "multiple": 64},
}
SETTINGS = (
    *("score", "compensate", "rounds", "loss", "temperature", "hard_frac", "optimizer", "batch_size"),
    *("peak_lr", "scratch_lr", "weight_decay"),
)
Measured = dict[str, float]


class HeldOutText:
    """Text by source as windows, tokenized once."""

    def __init__(
        self, tokenizer: Tokenizer, by_source: dict[str, list[Document]], device: torch.device
    ) -> None:
        self._texts: dict[str, tuple[Tensor, float]] = {}
        for source, docs in sorted(by_source.items()):
            text = "\n\n".join(document.text for document in docs)
            tokens = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)
            windows = tokens[: tokens.numel() // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN)
            self._texts[source] = windows.to(device), len(text.encode()) / tokens.numel()
        self.num_bytes = {
            source: windows.numel() * bytes_each for source, (windows, bytes_each) in self._texts.items()
        }

    @torch.no_grad()
    def bits_per_byte(self, model: Decoder, *, dtype: torch.dtype, at_most: int | None = None) -> Measured:
        """By source, and `all`; of the first `at_most` windows of each source."""
        found: Measured = {}
        for source, (windows, bytes_each) in self._texts.items():
            chosen = windows[:at_most]
            nll = 0.0
            for batch in chosen.split(32):
                with torch.autocast(batch.device.type, dtype=dtype, enabled=dtype != torch.float32):
                    nll += float(next_token(model, batch)) * batch.shape[0]
            found[source] = nll / chosen.shape[0] / math.log(2) / bytes_each
        weights = {
            source: min(at_most or 1 << 60, windows.shape[0]) * each
            for source, (windows, each) in self._texts.items()
        }
        total = sum(found[source] * weights[source] for source in found) / sum(weights.values())
        return {"all": total, **found}


def read_text(data: str) -> tuple[list[Document], dict[str, list[Document]]]:
    """(training documents, held-out documents by source)."""
    if Path(data).is_dir():
        return collect(Path(data))
    if data == "builtin://python":  # its own rule of what is held out
        return list(documents(load_card(data))), {
            "python": list(documents(load_card("builtin://python-eval")))
        }
    training = list[Document]()
    evaluation = list[Document]()
    for document in documents(load_card(data)):
        (evaluation if held_out(document.id) else training).append(document)
    return training, {load_card(data).spec.title: evaluation}


def token_stream(args: argparse.Namespace, tokenizer: Tokenizer, training: list[Document]) -> np.ndarray:
    """Ids of all training text; kept in the work directory."""
    file = args.work / "recovery-tokens.npy"
    if not file.exists():
        args.work.mkdir(parents=True, exist_ok=True)
        np.save(file, encode(tokenizer, training, seed=SEED))
    return np.load(file)


def pruned(args: argparse.Namespace, cut: dict[str, Any], stream: np.ndarray, work: Path) -> WeightSource:
    """The model after the prune stage, calibrated on windows spread over the training text."""
    source = resolve_model("path", args.model, None)
    device = str(pick_device())
    spec = Prune.model_validate(
        {**cut, "score": args.score, "compensate": args.compensate, "rounds": args.rounds}
    )
    length = 512
    starts = np.linspace(0, stream.size - length, args.num_samples).astype(np.int64)
    tokens_NS = torch.from_numpy(stream[starts[:, None] + np.arange(length)].astype(np.int32))
    work.mkdir()
    save_token_set(TokenSet(tokens_NS, 0, 0, {}), work / TOKENS_NAME)
    workspace = Workspace(work / "workspace")
    inputs = Inputs(source, {Port.DENSE: Input(source.path, source.digest), Port.CALIB: Input(work, "")})
    context = Context(device, SEED, workspace.scratch("prune"))
    return open_weights(
        workspace.commit("prune", "prune", {}, lambda out: prune(spec, inputs, out, context)).path
    )


def trained(
    model: Decoder,
    loss: Callable[..., Tensor],
    windows: TokenStream,
    config: TrainConfig,
    text: HeldOutText,
    args: argparse.Namespace,
) -> Iterator[tuple[int, float]]:
    """Train in place; (tokens, bits per byte over a part of the held-out text) before the first step and at
    every row."""
    device = pick_device()
    yield 0, text.bits_per_byte(model, dtype=config.compute_dtype, at_most=args.curve_windows)["all"]
    for row in Training(model, loss, windows.batch, config, device=device).rows():
        measured = text.bits_per_byte(model, dtype=config.compute_dtype, at_most=args.curve_windows)["all"]
        print(
            f"  {row.num_tokens / 1e6:.1f} M tokens, loss {row.loss:.4f}, {measured:.4f} bits per byte, "
            f"{row.tokens_per_s:,.0f} tokens/s",
            flush=True,
        )
        yield row.num_tokens, measured


def final(source: WeightSource, text: HeldOutText, args: argparse.Namespace) -> Measured:
    """Of a model as its checkpoint is read."""
    decoder = build_decoder(source, dtype=torch.float32, device=pick_device())
    return text.bits_per_byte(decoder, dtype=torch.float32, at_most=args.eval_windows)


def run(
    name: str, args: argparse.Namespace, stream: np.ndarray, text: HeldOutText, work: Path
) -> dict[str, Any]:
    device = pick_device()
    dtype = torch.bfloat16 if device.type == "cuda" or args.bfloat16 else torch.float32
    source = open_weights(Path(args.model))
    started_s = time.perf_counter()
    cut = pruned(args, EXPERIMENTS[name], stream, work)
    seconds = {"prune": time.perf_counter() - started_s}
    bpb = {"source": final(source, text, args), "pruned": final(cut, text, args)}
    print(
        f"{name}: source {bpb['source']['all']:.4f}, pruned {bpb['pruned']['all']:.4f} bits per byte",
        flush=True,
    )
    num_steps = max(1, round(args.tokens / args.batch_size / SEQ_LEN))
    windows = TokenStream(
        torch.from_numpy(stream.astype(np.int32)).to(device),
        seq_len=SEQ_LEN,
        batch_size=args.batch_size,
        seed=SEED,
    )
    compiled = device.type == "cuda"
    teacher = Teacher(build_decoder(source, dtype=dtype, device=device), device=device, compile=compiled)
    recovering = build_decoder(cut, dtype=torch.float32, device=device).requires_grad_(True)
    scratch = fresh_decoder(cut.arch, generator=torch.Generator().manual_seed(SEED)).to(device)
    objective = Objective(
        Divergence(args.loss, args.temperature, args.hard_frac),
        teacher,
        compute_dtype=dtype,
        compile=compiled,
    )
    curves: dict[str, list[tuple[int, float]]] = {}
    for what, model, loss, peak_lr in (
        ("recovered", recovering, objective, args.peak_lr),
        ("scratch", scratch, next_token, args.scratch_lr),
    ):
        config = TrainConfig(
            num_steps, args.batch_size, min(args.batch_size, args.micro_batch_size), peak_lr, args.optimizer,
            compute_dtype=dtype, weight_decay=args.weight_decay,
            log_every=max(1, num_steps // args.curve_points), compile=compiled and what == "scratch",
        )  # fmt: skip
        started_s = time.perf_counter()
        curves[what] = list(trained(model, loss, windows, config, text, args))
        seconds[what] = time.perf_counter() - started_s
        bpb[what] = final(MemorySource(model, dtype=torch.bfloat16), text, args)
        print(f"{name}: {what} {bpb[what]['all']:.4f} bits per byte after {seconds[what]:.0f} s", flush=True)
    return {
        "experiment": name,
        "tool": "compress",
        "model": Path(args.model).name,
        "before": widths(source.arch),
        "after": widths(cut.arch),
        **{f"bpb_{what}": measured["all"] for what, measured in bpb.items()},
        "ratio": bpb["recovered"]["all"] / bpb["source"]["all"],
        "by_source": bpb,
        "tokens": num_steps * args.batch_size * SEQ_LEN,
        "seconds": {what: round(value, 1) for what, value in seconds.items()},
        "curve": [
            {"tokens": tokens, "bpb_recovered": round(one, 5), "bpb_scratch": round(other, 5)}
            for (tokens, one), (_, other) in zip(curves["recovered"], curves["scratch"], strict=True)
        ],
        "settings": {key: getattr(args, key) for key in SETTINGS},
    }


def widths(arch: Arch) -> dict[str, int]:
    first = arch.layers[0]
    named = {
        "heads": first.num_heads,
        "kv_heads": first.num_kv_heads,
        "ffn": first.intermediate_size,
        "layers": arch.num_layers,
    }
    return {"params": arch.num_params, **named}


def table(rows: list[dict[str, Any]]) -> str:
    header = [
        "experiment",
        "parameters",
        "source",
        "pruned",
        "recovered",
        "x source",
        "scratch",
        "M tokens",
        "s",
    ]
    return markdown(
        header,
        [
            [
                row["experiment"],
                f"{row['after']['params'] / row['before']['params']:.3f}",
                *(f"{row[f'bpb_{what}']:.4f}" for what in ("source", "pruned", "recovered")),
                f"{row['ratio']:.4f}",
                f"{row['bpb_scratch']:.4f}",
                f"{row['tokens'] / 1e6:.1f}",
                f"{sum(row['seconds'].values()):.0f}",
            ]
            for row in rows
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", default="builtin://python", help="a directory with *.jsonl.xz, or a data card"
    )
    parser.add_argument(
        "--model",
        default=str(resolve_model("builtin", "reference", None).path),
        help="directory of the source",
    )
    parser.add_argument("--experiments", nargs="+", default=list(EXPERIMENTS), choices=list(EXPERIMENTS))
    parser.add_argument("--tokens", type=float, default=60e6, help="of training text, for each run")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences of 1,024 a step")
    parser.add_argument("--micro-batch-size", type=int, default=32)
    parser.add_argument("--optimizer", default="muon", choices=["muon", "adamw"])
    parser.add_argument("--peak-lr", type=float, default=1e-3, help="of the recovery")
    parser.add_argument("--scratch-lr", type=float, default=6e-3, help="of the training from scratch")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--loss", default="forward_kl", choices=["forward_kl", "reverse_kl", "js"])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--hard-frac", type=float, default=0.0, help="share of the loss that is the text's own next token"
    )
    parser.add_argument("--score", default="obs")
    parser.add_argument("--compensate", default="least_squares")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--num-samples", type=int, default=128, help="windows of 512 that pruning is calibrated on"
    )
    parser.add_argument("--curve-points", type=int, default=20)
    parser.add_argument(
        "--eval-windows", type=int, default=None, help="of each source of held-out text; all by default"
    )
    parser.add_argument(
        "--curve-windows",
        type=int,
        default=64,
        help="of each source of held-out text, for a point of the curve",
    )
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16 on a CPU that has it")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "bench-recovery",
        help="the token stream is kept here",
    )
    parser.add_argument("--commit", default=None)
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        help="write the result file here, beside the rows of other experiments",
    )
    args = parser.parse_args()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    tokenizer = Tokenizer.from_file(str(Path(args.model) / "tokenizer.json"))
    training, evaluation = read_text(args.data)
    stream = token_stream(args, tokenizer, training)
    text = HeldOutText(tokenizer, evaluation, pick_device())
    print(f"{stream.size / 1e6:.1f} M training tokens; held out {text.num_bytes}", flush=True)
    kept = json.loads(args.out.read_text())["rows"] if args.out is not None and args.out.exists() else []
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.experiments:
            rows.append(run(name, args, stream, text, Path(scratch) / name))
            if args.out is not None:
                others = [row for row in kept if row["experiment"] not in args.experiments]
                write_results(
                    args.out,
                    [*others, *rows],
                    device=pick_device(),
                    commit=args.commit,
                    facts={"data": args.data},
                )
    print(table(rows))


if __name__ == "__main__":
    main()
