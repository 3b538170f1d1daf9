"""Whether greedy speculation gives the very tokens of plain greedy decoding: every scheme, proposer, KV cache
and batch size, on text.

    python -m scripts.bench_bitwise --num-prompts 200 --output-tokens 128 --out benchmarks/bitwise.json
    python -m scripts.bench_bitwise --draft ./draft-artifact --draft ./eagle3-artifact --processes 6
        drafts that the stage made

Prompts are beginnings of windows of the evaluation text. Targets are the model as it is and, quantized by the
stage, in each scheme. A draft is made for one target; for the others it only proposes worse, which is nothing
to what comes out. Without `--draft` it is every fourth layer of the model itself. A row is a target, KV
cache, proposer and batch size: `equal_frac` of all requests, and the acceptance length, which says that
proposals were kept and rejected. A request that differs ends in exit code 1. Several processes share the
device: nothing is timed.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from compress.artifact.manifest import MANIFEST_NAME, open_artifact
from compress.artifact.workspace import Workspace
from compress.context import Context
from compress.data.model_tokens import TOKENS_NAME, read_tokens
from compress.data.tokens import save_token_set
from compress.export import open_weights
from compress.models.eagle3 import draft_head
from compress.models.pruning import LayerSubset
from compress.models.weights import Dense
from compress.pipeline import resolve_source
from compress.registry.model_source import ModelSource
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative.draft_model import DraftModel
from compress.runtime.speculative.eagle3 import Eagle3
from compress.runtime.speculative.ngram import NGram
from compress.runtime.speculative.proposer import ProposerOptions
from compress.runtime.speculative.speculation import Speculative
from compress.stages import Input, Inputs, Port
from compress.stages.quantize import quantize
from compress.stages.quantize.spec import Quantize
from scripts.bench_setup import markdown, pick_device, write_results

DENSE = "dense"
CALIBRATION = {"num_samples": 16, "seq_len": 512}


def quantized(source: ModelSource, scheme: str, place: Path, device: torch.device) -> Path:
    """The model in a scheme, by the stage."""
    tokens, _ = read_tokens(source, "builtin://python", seed=0, offline=True, **CALIBRATION)
    text = place / f"{scheme}-text"
    text.mkdir()
    save_token_set(tokens, text / TOKENS_NAME)
    workspace = Workspace(place)
    spec = Quantize.model_validate({"scheme": scheme})
    inputs = Inputs(source, {Port.DENSE: Input(source.path, source.digest), Port.CALIB: Input(text, "")})
    ctx = Context(str(device), 0, workspace.scratch(scheme))
    return workspace.commit(scheme, "quantize", {}, lambda out: quantize(spec, inputs, out, ctx)).path


def proposers(args: argparse.Namespace, source: ModelSource) -> Iterator[tuple[str, ProposerOptions]]:
    yield "ngram", NGram()
    for place in args.draft:
        if (place / MANIFEST_NAME).exists() and open_artifact(place).manifest.facts["draft"][
            "kind"
        ] == "eagle3":
            yield "eagle3", Eagle3(draft_head(open_artifact(place)))
        else:
            yield "draft", DraftModel(open_weights(place))
    if not args.draft:
        weights = open_weights(source.path)
        yield (
            "every fourth layer",
            DraftModel(LayerSubset(Dense(weights), list(range(0, weights.arch.num_layers, 4)))),
        )


def compared(args: argparse.Namespace, scheme: str, target: Path, kv_format: str) -> list[dict[str, Any]]:
    """All proposers and batch sizes of one target and cache."""
    source = resolve_source(args.model)
    device = pick_device()
    weights = open_weights(target)
    length = args.prompt_tokens + args.output_tokens
    tokens, _ = read_tokens(
        source,
        args.data,
        num_samples=args.num_prompts,
        seq_len=2 * args.prompt_tokens,
        seed=None,
        offline=True,
    )
    params = SamplingParams(args.output_tokens, ignore_eos=True)
    prompts = [tuple(window[: args.prompt_tokens].tolist()) for window in tokens.tokens_NS]
    requests = [Request(str(idx), prompt, params) for idx, prompt in enumerate(prompts)]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = EngineConfig(
        dtype=dtype, max_model_len=length, kv_format=kv_format, max_batch_size=max(args.batch_sizes)
    )
    rows = []
    for batch_size in args.batch_sizes:
        served = replace(config, max_batch_size=batch_size)
        plain = [each.tokens for each in Engine(weights, device=device, config=served).generate(requests)]
        for name, options in proposers(args, source):
            engine = Engine(
                weights, device=device, config=replace(served, speculative=Speculative(options, k=args.k))
            )
            equal = sum(
                ours.tokens == theirs for ours, theirs in zip(engine.generate(requests), plain, strict=True)
            )
            assert engine.acceptance is not None
            facts = {
                "experiment": "bitwise",
                "model": args.model,
                "scheme": scheme,
                "dtype": str(dtype).removeprefix("torch."),
            }
            conditions = {
                "kv": engine.kv_format,
                "proposer": name,
                "k": args.k,
                "temperature": 0.0,
                "batch_size": batch_size,
            }
            found = {"num_requests": len(requests), "output_tokens": args.output_tokens, "num_equal": equal}
            lengths = {
                "equal_frac": equal / len(requests),
                "acceptance_length": engine.acceptance.acceptance_length,
            }
            rows.append(facts | conditions | found | lengths)
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    header = ["target", "KV cache", "proposer", "batch", "equal", "acceptance length"]
    body = [
        [
            *(str(row[name]) for name in ("scheme", "kv", "proposer", "batch_size")),
            f"{row['num_equal']} of {row['num_requests']}",
            f"{row['acceptance_length']:.2f}",
        ]
        for row in rows
    ]
    return markdown(header, body)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin://reference")
    parser.add_argument(
        "--schemes",
        nargs="+",
        default=[DENSE, "W4A16_G128", "FP8_DYNAMIC"],
        help=f"'{DENSE}': as the model is",
    )
    parser.add_argument("--kv-formats", nargs="+", default=["DENSE", "FP8_TOKEN_HEAD"])
    parser.add_argument(
        "--draft", type=Path, action="append", default=[], help="a draft's artifact, or a model directory"
    )
    parser.add_argument("--data", default="builtin://python-eval")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[16, 4, 1])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--commit", default=None, help="of the code that is measured; the checkout's by default"
    )
    parser.add_argument("--out", type=Path, default=None, help="write the result file here")
    args = parser.parse_args()
    device = pick_device()
    with tempfile.TemporaryDirectory() as place:
        source = resolve_source(args.model)
        targets = {
            each: source.path if each == DENSE else quantized(source, each, Path(place), device)
            for each in args.schemes
        }
        with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
            jobs = [
                pool.submit(compared, args, scheme, path, kv)
                for scheme, path in targets.items()
                for kv in args.kv_formats
            ]
            rows = [row for job in jobs for row in job.result()]
    print(table(rows))
    if args.out is not None:
        write_results(
            args.out,
            rows,
            device=device,
            commit=args.commit,
            facts={"data": args.data, "prompt_tokens": args.prompt_tokens},
        )
    return int(any(row["num_equal"] < row["num_requests"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
