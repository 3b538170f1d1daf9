r"""What distillation gives a draft: tokens a step of speculative decoding on continuations of held-out text,
by kind of text, beside the same draft as it begins and beside n-gram lookup.

    python -m scripts.bench_draft --data TEXT_DIR --more-python 4 \
        --draft 'draft={"init": {"keep_layers": 4}, "tokens": 100000000}'
    python -m scripts.bench_draft --data my-text.yaml --eval mine=my-evaluation.yaml \
        --draft wide='{"init": {"keep_layers": 4}}'
    python -m scripts.bench_draft --draft kl='{"loss": {"kind": "forward_kl"}}' \
        --draft eagle3='{"init": {"kind": "eagle3"}}'

The target is the model in `--scheme`, quantized by the stage on windows of the training text. Each `--draft
NAME=JSON` is what a recipe says of a draft (`init`, `loss`, `lr`, `quantize`, ...); it is trained by the
stage on the text of `--data` and served by the engine. TEXT_DIR is a directory as `train_reference.py` reads
it, whose documents held out there are the categories `prose` and, of Python, `code`; a data card is split by
the same rule; `--eval NAME=CARD` adds a category.

A prompt is the beginning of a window; rows are a category, a proposer, a temperature (with the rule
"rejection") and a batch size: acceptance length (tokens that come out of a request's step, at most k + 1),
acceptance rate (of proposals that were looked at), and by position the share of steps that kept a token
there; time a token beside plain decoding; `repeated_4grams`, the share of generated 4-grams that the same
continuation had before: a model that repeats itself is easy to guess. Greedy rows say how many requests have
the very tokens of plain decoding; a request that has not ends in exit code 1. `expected_length` is what the
draft stage measures on text, without an engine.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from compress.artifact.manifest import Artifact
from compress.artifact.workspace import Workspace
from compress.artifact.writer import ArtifactWriter
from compress.context import Context
from compress.data.card import documents, load_card
from compress.data.corpus import Document
from compress.data.model_tokens import TOKENS_NAME
from compress.data.tokens import TokenSet, save_token_set
from compress.digest import digest_bytes, digest_json
from compress.export import open_weights
from compress.models.eagle3 import draft_head
from compress.models.pruning import LayerSubset
from compress.models.weights import Dense, WeightSource, build_decoder
from compress.registry.model_source import ModelSource, resolve_model
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Finished, Request, SamplingParams
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.eagle3 import Eagle3
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.proposer import ProposerOptions
from compress.runtime.speculative.speculation import Acceptance, Speculative
from compress.stages import Input, Inputs, Port
from compress.stages.distill.learning import learning_facts
from compress.stages.distill.models import NamedTeacher
from compress.stages.distill.text import TrainingText, sample_text
from compress.stages.draft.inits import DraftTask
from compress.stages.draft.inits.pruned import Pruned
from compress.stages.draft.spec import Draft
from compress.stages.quantize import quantize
from compress.stages.quantize.spec import Quantize
from scripts.bench_recovery import read_text
from scripts.bench_setup import markdown, pick_device, write_results
from scripts.bench_speculative import repeated_4grams, tpot_ms
from scripts.train_reference import encode

SEED = 0
CALIBRATION_LEN = 512


class Printed:
    """Progress, a line every ten seconds."""

    def __init__(self) -> None:
        self._last_s = 0.0

    def update(self, done: int, total: int, note: str) -> None:
        if time.perf_counter() - self._last_s > 10 or done == total:
            self._last_s = time.perf_counter()
            print(f"  {done}/{total} {note}", flush=True)

    def log(self, text: str) -> None:
        print(text, flush=True)


@dataclass(frozen=True)
class Bench:
    """What all rows have in common. Windows int32 [N, S+1] by category."""

    args: argparse.Namespace
    device: torch.device
    source: ModelSource
    stream: np.ndarray
    held_out: dict[str, Tensor]
    workspace: Workspace
    stream_digest: str

    def windows(self, length: int, num: int) -> Tensor:
        """Of the training text, spread over all of it."""
        starts = np.linspace(0, self.stream.size - length, num).astype(np.int64)
        return torch.from_numpy(self.stream[starts[:, None] + np.arange(length)].astype(np.int32))

    def context(self, key: str) -> Context:
        return Context(str(self.device), SEED, self.workspace.scratch(key), Printed())


def categories(
    args: argparse.Namespace, by_source: dict[str, list[Document]], tokenizer: Tokenizer
) -> dict[str, Tensor]:
    texts: dict[str, list[Document]] = {}
    for source, docs in sorted(by_source.items()):
        texts.setdefault("code" if "python" in source.lower() else "prose", []).extend(docs)
    for each in args.eval:
        name, _, card = each.partition("=")
        texts[name] = list(documents(load_card(card)))
    found = {}
    for name, docs in texts.items():
        tokens = torch.tensor(
            tokenizer.encode("\n\n".join(each.text for each in docs), add_special_tokens=False).ids,
            dtype=torch.int32,
        )
        length = args.seq_len + 1
        windows = tokens[: tokens.numel() // length * length].view(-1, length)
        found[name] = windows[torch.linspace(0, len(windows) - 1, min(args.num_prompts, len(windows))).long()]
    return found


def target_of(bench: Bench) -> Artifact:
    """The model in codes, made once for a work directory."""
    spec = Quantize.model_validate({"scheme": bench.args.scheme, "preset": bench.args.preset})
    key = (
        "target-"
        + digest_json(
            [bench.source.digest, bench.stream_digest, spec.model_dump(mode="json", serialize_as_any=True)]
        )[7:23]
    )
    text = bench.workspace.root / f"{key}-text"
    text.mkdir(parents=True, exist_ok=True)
    save_token_set(
        TokenSet(bench.windows(CALIBRATION_LEN, bench.args.num_samples), 0, 0, {}), text / TOKENS_NAME
    )
    inputs = Inputs(
        bench.source, {Port.DENSE: Input(bench.source.path, bench.source.digest), Port.CALIB: Input(text, "")}
    )
    return bench.workspace.commit(
        key, "quantize", {}, lambda out: quantize(spec, inputs, out, bench.context(key))
    )


def spec_of(bench: Bench, changes: dict[str, Any]) -> Draft:
    args = bench.args
    num_tokens = int(changes.get("tokens", args.tokens))
    said = {
        "tokens": num_tokens,
        "passes": -(-num_tokens // bench.stream.size),
        "seq_len": args.seq_len,
        "batch_size": args.batch_size,
        "micro_batch_size": min(args.batch_size, args.micro_batch_size),
        "compile": bench.device.type == "cuda",
        **changes,
    }
    return Draft.model_validate(said)


def trained(bench: Bench, target: Artifact, name: str, spec: Draft) -> Artifact:
    """The draft, made once for a work directory, with the facts of its training."""
    length = spec.seq_len + 1
    num = spec.num_windows
    tokens_NS = torch.from_numpy(bench.stream[: num * length].reshape(num, length).astype(np.int32))
    held_out_NS = torch.cat([each[: spec.eval_samples] for each in bench.held_out.values()])
    text = TrainingText(
        TokenSet(tokens_NS, 0, 0, {"title": str(bench.args.data), "license": ""}), held_out_NS, 1
    )
    weights = open_weights(target.path)
    dtype = spec.computes_in(bench.device)
    said = spec.model_dump(mode="json", serialize_as_any=True)
    key = f"draft-{name}-" + digest_json([target.digest, bench.stream_digest, said, str(dtype)])[7:23]

    def build(out: ArtifactWriter) -> None:
        started_s = time.perf_counter()
        context = bench.context(key)
        learns_on = text
        if spec.sample is not None:
            learns_on = text.with_training(
                sample_text(spec.sample, tokens_NS, weights, context, device=bench.device)
            )
        decoder = build_decoder(weights, dtype=dtype, device=bench.device)
        named = NamedTeacher("target", target.digest, target.path, weights)
        made = spec.kind.make(
            DraftTask(spec, bench.source, named, decoder, learns_on, dtype, bench.device), context
        )
        described = made.write(out)
        facts = {
            **learning_facts(spec, dtype, made.curve),
            **made.facts,
            "seconds": round(time.perf_counter() - started_s, 1),
        }
        out.describe(role="draft", facts={"draft": facts}, **described)

    return bench.workspace.commit(key, "draft", {}, build)


def undistilled(target: Artifact, spec: Draft) -> WeightSource:
    """The layers that the draft began with: as they are in the target, codes if the draft has codes too."""
    weights = open_weights(target.path)
    assert isinstance(spec.init, Pruned)
    return LayerSubset(weights if spec.quantize is not None else Dense(weights), spec.init.kept(weights.arch))


def proposers_of(
    bench: Bench, target: Artifact
) -> tuple[dict[str, ProposerOptions], dict[str, dict[str, Any]]]:
    """By name, and what is known of those that were trained."""
    proposers: dict[str, ProposerOptions] = {"ngram": NGram()}
    facts: dict[str, dict[str, Any]] = {}
    for each in bench.args.draft or ["draft={}"]:
        name, _, text = each.partition("=")
        spec = spec_of(bench, json.loads(text or "{}"))
        artifact = trained(bench, target, name, spec)
        facts[name] = artifact.manifest.facts["draft"]
        proposers[name] = (
            Eagle3(draft_head(artifact))
            if facts[name]["kind"] == "eagle3"
            else DraftModel(open_weights(artifact.path))
        )
        if isinstance(spec.init, Pruned) and spec.init.heads is None and spec.init.ffn is None:
            proposers.setdefault("draft_undistilled", DraftModel(undistilled(target, spec)))
        print(f"{name}: {_line(facts[name])}", flush=True)
    return proposers, facts


def _line(facts: dict[str, Any]) -> str:
    before = facts["before"]
    after = facts["after"]
    return (
        f"{facts['params'] / 1e6:.1f} M parameters, {facts['tokens'] / 1e6:.1f} M tokens in "
        f"{facts['seconds']:.0f} s: acceptance "
        f"{before['acceptance']:.3f} -> {after['acceptance']:.3f}, length {before['acceptance_length']:.2f} "
        "-> "
        f"{after['acceptance_length']:.2f}, KL {before['kl']:.3f} -> {after['kl']:.3f}, top-1 "
        f"{before['top1']:.3f} -> {after['top1']:.3f}"
    )


def requests_of(windows: Tensor, args: argparse.Namespace, temperature: float) -> list[Request]:
    params = SamplingParams(args.output_tokens, temperature=temperature, ignore_eos=True)
    prompts = [tuple(window[: args.prompt_tokens].tolist()) for window in windows]
    return [Request(str(idx), prompt, replace(params, seed=idx)) for idx, prompt in enumerate(prompts)]


def acceptance_rate(found: Acceptance) -> float:
    """Of the proposals that were looked at: those behind a rejected one were not."""
    looked_at = found.proposed[0] + sum(found.accepted[:-1])
    return sum(found.accepted) / looked_at if looked_at else 0.0


def row_of(engine: Engine, requests: Sequence[Request], plain: Sequence[Finished]) -> dict[str, Any]:
    engine.reset_acceptance()
    finished = engine.generate(requests)
    found = engine.acceptance
    assert found is not None
    alike = sum(ours.tokens == theirs.tokens for ours, theirs in zip(finished, plain, strict=True))
    return {
        "acceptance_length": found.acceptance_length,
        "acceptance_rate": acceptance_rate(found),
        "acceptance_rates": list(found.rates),
        "accepted": list(found.accepted),
        "num_steps": found.num_rows,
        "tpot_ms_plain": tpot_ms(list(plain)),
        "tpot_ms": tpot_ms(finished),
        "speedup": tpot_ms(list(plain)) / tpot_ms(finished),
        "repeated_4grams": float(np.mean([repeated_4grams(each.tokens) for each in finished])),
        "identical": alike,
        "num_requests": len(requests),
    }


def measure(bench: Bench, target: Artifact) -> list[dict[str, Any]]:
    args = bench.args
    weights = open_weights(target.path)
    proposers, facts = proposers_of(bench, target)
    rows = []
    for batch_size in args.batch_sizes:
        config = EngineConfig(
            max_batch_size=batch_size, max_model_len=args.prompt_tokens + args.output_tokens
        )
        plainly = Engine(weights, device=bench.device, config=config)
        engines = {
            name: Engine(
                weights,
                device=bench.device,
                config=replace(config, speculative=Speculative(each, k=args.k, rule="rejection")),
            )
            for name, each in proposers.items()
        }
        for category, windows in bench.held_out.items():
            for temperature in args.temperatures:
                requests = requests_of(windows, args, temperature)
                for engine in (plainly, *engines.values()):
                    engine.generate(requests[:batch_size])  # compiles, and captures graphs
                plain = plainly.generate(requests)
                for name, engine in engines.items():
                    said = {
                        "model": bench.source.name,
                        "scheme": args.scheme,
                        "proposer": name,
                        "k": args.k,
                        "temperature": temperature,
                    }
                    trained_on = (
                        {
                            **{key: facts[name][key] for key in ("tokens", "seconds", "params")},
                            "expected_length": facts[name]["after"]["acceptance_length"],
                        }
                        if name in facts
                        else {}
                    )
                    found = row_of(engine, requests, plain)
                    rows.append(
                        {**said, "category": category, "batch_size": batch_size, **found, **trained_on}
                    )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    header = (
        "category",
        "T",
        "batch",
        "proposer",
        "acceptance length",
        "rate",
        "kept by position",
        "speed-up",
        "repeated 4-grams",
        "same",
    )
    return markdown(
        header,
        [
            (
                row["category"], f"{row['temperature']:g}", str(row["batch_size"]), row["proposer"],
                f"{row['acceptance_length']:.2f}", f"{row['acceptance_rate']:.2f}",
                " ".join(f"{rate:.2f}" for rate in row["acceptance_rates"]), f"{row['speedup']:.2f}",
                f"{row['repeated_4grams']:.2f}",
                f"{row['identical']} of {row['num_requests']}" if row["temperature"] == 0 else "-",
            )
            for row in rows
        ],
    )  # fmt: skip


def token_stream(args: argparse.Namespace, tokenizer: Tokenizer, training: list[Document]) -> np.ndarray:
    """Ids of all training text in a seeded order; kept in the work directory."""
    file = args.work / f"stream-{digest_json([str(args.data), args.more_python])[7:15]}.npy"
    if not file.exists():
        args.work.mkdir(parents=True, exist_ok=True)
        python = list(documents(load_card("builtin://python"))) if args.more_python else []
        np.save(file, encode(tokenizer, training + args.more_python * python, seed=SEED))
    return np.load(file)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", default="builtin://python", help="a directory with *.jsonl.xz, or a data card"
    )
    parser.add_argument(
        "--more-python",
        type=int,
        default=0,
        metavar="N",
        help="times that builtin://python is added to the training text",
    )
    parser.add_argument(
        "--eval", action="append", default=[], metavar="NAME=CARD", help="another category of held-out text"
    )
    parser.add_argument("--model", default="builtin://reference")
    parser.add_argument("--scheme", default="W4A16_G128", help="of the target")
    parser.add_argument("--preset", default="balanced", help="of the target's quantization")
    parser.add_argument(
        "--num-samples", type=int, default=128, help="windows of 512 that the target is calibrated on"
    )
    parser.add_argument(
        "--draft",
        action="append",
        metavar="NAME=JSON",
        help="what a recipe says of a draft; one with defaults if left out",
    )
    parser.add_argument("--tokens", type=float, default=60e6, help="to train each draft on")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--micro-batch-size", type=int, default=64)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--num-prompts", type=int, default=64, help="of each category")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.0])
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "bench-draft",
        help="what was made is kept here",
    )
    parser.add_argument(
        "--commit", default=None, help="of the code that is measured; the checkout's by default"
    )
    parser.add_argument("--out", type=Path, default=None, help="write the result file here")
    args = parser.parse_args()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    scheme, _, name = args.model.partition("://") if "://" in args.model else ("path", "", args.model)
    source = resolve_model(scheme, name, None)
    tokenizer = Tokenizer.from_file(str(source.path / "tokenizer.json"))
    training, evaluation = read_text(args.data)
    stream = token_stream(args, tokenizer, training)
    bench = Bench(
        args,
        pick_device(),
        source,
        stream,
        categories(args, evaluation, tokenizer),
        Workspace(args.work / "workspace"),
        digest_bytes(stream.tobytes()),
    )
    print(
        f"{stream.size / 1e6:.1f} M training tokens; windows held out "
        f"{ ({key: len(each) for key, each in bench.held_out.items()}) }",
        flush=True,
    )
    rows = measure(bench, target_of(bench))
    print(table(rows))
    if args.out is not None:
        conditions = {
            "data": args.data,
            "more_python": args.more_python,
            "prompt_tokens": args.prompt_tokens,
            "output_tokens": args.output_tokens,
        }
        write_results(
            args.out, rows, device=bench.device, commit=args.commit, facts=conditions | {"drafts": args.draft}
        )
    return int(any(row["temperature"] == 0 and row["identical"] != row["num_requests"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
