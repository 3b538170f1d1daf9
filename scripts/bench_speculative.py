r"""What speculation gives on text: tokens a step, time a token, and whether every token is the one that plain
decoding gives.

    python -m scripts.bench_speculative                           the bundled model and text, n-gram proposals
    python -m scripts.bench_speculative --model ./my-model --draft ./my-draft --batch-sizes 1 4 16 \
        --out speculative.json

A prompt is the beginning of a window of the evaluation text. Rows are a proposer, a temperature and a batch
size: acceptance length (tokens that come out of a request's step), for each position how many of its
proposals were kept (those behind a rejected one were not), TPOT with and without (medians over requests), and
`identical`: requests whose tokens are those of plain decoding. `repeated 4-grams` is the share of generated
4-grams that the same continuation had before: a model that repeats itself is easy to guess. A request that
differs ends in exit code 1.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compress.data.model_tokens import read_tokens
from compress.export import open_weights
from compress.export.speculators import open_eagle3
from compress.models.weights import WeightSource
from compress.pipeline import resolve_source
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Finished, Request, SamplingParams
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.eagle3 import Eagle3
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.proposer import ProposerOptions
from compress.runtime.speculative.speculation import Speculative
from compress.validate.acceptance import repeated_4grams
from compress.validate.speculation import tpot_ms
from scripts.bench_setup import markdown, pick_device, write_results


def compared(engine: Engine, plain: list[Finished], requests: list[Request]) -> dict[str, Any]:
    finished = engine.generate(requests)
    acceptance = engine.acceptance
    assert acceptance is not None
    alike = sum(ours.tokens == theirs.tokens for ours, theirs in zip(finished, plain, strict=True))
    before_ms = tpot_ms(plain)
    after_ms = tpot_ms(finished)
    return {
        "acceptance_length": acceptance.acceptance_length,
        "acceptance_rates": list(acceptance.rates),
        "proposed": list(acceptance.proposed),
        "accepted": list(acceptance.accepted),
        "tpot_ms_plain": before_ms,
        "tpot_ms": after_ms,
        "speedup": before_ms / after_ms,
        "identical": f"{alike} of {len(plain)}",
        "num_different": len(plain) - alike,
        "repeated_4grams": float(np.mean([repeated_4grams(each.tokens) for each in plain])),
    }


def measure(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    source = resolve_source(args.model)
    weights = open_weights(source.path)
    length = 2 * args.prompt_tokens
    tokens, _ = read_tokens(
        source, args.data, num_samples=args.num_prompts, seq_len=length, seed=None, offline=True
    )
    prompts = [tuple(window[: args.prompt_tokens].tolist()) for window in tokens.tokens_NS]
    proposers: dict[str, ProposerOptions] = {"ngram": NGram()}
    if args.draft is not None:
        draft: WeightSource = open_weights(resolve_source(args.draft).path)
        proposers["draft_model"] = DraftModel(draft)
    if args.head is not None:
        proposers["eagle3"] = Eagle3(open_eagle3(args.head))
    rows = []
    for batch_size in args.batch_sizes:
        config = EngineConfig(
            dtype=None if args.dtype is None else getattr(torch, args.dtype),
            max_batch_size=batch_size,
            max_model_len=args.prompt_tokens + args.output_tokens,
            kv_format=args.kv_format,
        )
        engines = {
            name: Engine(
                weights, device=device, config=replace(config, speculative=Speculative(each, k=args.k))
            )
            for name, each in proposers.items()
        }
        plainly = Engine(weights, device=device, config=config)
        for temperature in args.temperatures:
            params = SamplingParams(args.output_tokens, temperature=temperature, ignore_eos=True)
            requests = [
                Request(str(idx), prompt, replace(params, seed=idx)) for idx, prompt in enumerate(prompts)
            ]
            for engine in (plainly, *engines.values()):
                engine.generate(requests[:batch_size])  # compiles, and captures graphs
                engine.reset_acceptance()
            plain = plainly.generate(requests)
            for name, engine in engines.items():
                facts = {
                    "proposer": name,
                    "k": args.k,
                    "temperature": temperature,
                    "batch_size": batch_size,
                    "kv_format": engine.kv_format,
                }
                facts |= {"dtype": str(engine.dtype).removeprefix("torch.")}
                rows.append(facts | compared(engine, plain, requests))
                engine.reset_acceptance()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    header = (
        "proposer",
        "T",
        "batch",
        "acceptance length",
        "rate by position",
        "TPOT plain",
        "TPOT",
        "speed-up",
        "identical",
        "repeated 4-grams",
    )
    return markdown(
        header,
        [
            (
                row["proposer"], f"{row['temperature']:g}", str(row["batch_size"]),
                f"{row['acceptance_length']:.2f}",
                " ".join(f"{rate:.2f}" for rate in row["acceptance_rates"]), f"{row['tpot_ms_plain']:.2f} ms",
                f"{row['tpot_ms']:.2f} ms", f"{row['speedup']:.2f}", row["identical"],
                f"{row['repeated_4grams']:.2f}",
            )
            for row in rows
        ],
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin://reference")
    parser.add_argument(
        "--draft", default=None, help="a model of the same vocabulary that proposes; n-grams alone by default"
    )
    parser.add_argument(
        "--head", type=Path, default=None, help="an EAGLE-3 head of the model, in the speculators layout"
    )
    parser.add_argument("--data", default="builtin://python-eval")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--kv-format", default=None)
    parser.add_argument(
        "--dtype",
        default=None,
        choices=["float32", "bfloat16", "float16"],
        help="by default float32 on a CPU, else the model's",
    )
    parser.add_argument(
        "--commit", default=None, help="of the code that is measured; the checkout's by default"
    )
    parser.add_argument("--out", type=Path, default=None, help="write the result file here")
    args = parser.parse_args()
    device = pick_device()
    rows = measure(args, device)
    print(table(rows))
    if args.out is not None:
        conditions = {
            "model": args.model,
            "draft": args.draft,
            "head": args.head and str(args.head),
            "data": args.data,
            "prompt_tokens": args.prompt_tokens,
        }
        write_results(
            args.out,
            rows,
            device=device,
            commit=args.commit,
            facts=conditions | {"output_tokens": args.output_tokens},
        )
    return int(any(row["num_different"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
