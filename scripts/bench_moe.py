"""How fast the bundled runtime serves a mixture of experts, against the floor of the bytes that are hit.

    python -m scripts.bench_moe --model qwen3-30b-a3b --out benchmarks/h200/moe.json

Weights are random, and a random model's routers collapse: hidden states of deep layers become alike, and a
batch hits some 20 experts. A trained model spreads its tokens, so here embeddings are as large as the stream
and what layers add is small (`SpreadSource`): tokens keep hidden states of their own, and routing is close to
uniform. `experts_hit` is how many experts of a layer the rows of a decode step are routed to, the mean over
layers and steps, counted over the tokens that this engine generated.

    floor_ms    bytes of attention, routers, head and of the experts that are hit, and the cache, at the read
                bandwidth measured in this run
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compress.kernels.problem import RECURRENCE_OPS, Phase
from compress.machine import measure_bandwidth
from compress.models.arch import Arch
from compress.models.random_source import RandomSource
from compress.quant.scheme import QuantizedWeight
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.expert_linears import ExpertLinears
from compress.runtime.request import Request, SamplingParams
from compress.validate.latency import LatencyConditions, measure_latency
from compress.validate.profile.steps import profile_steps
from scripts.bench_setup import (
    argument_parser,
    markdown,
    model_dtype,
    parse_arguments,
    pick_device,
    read_arch,
    scheme_text,
    schemes_of,
    write_results,
)
from scripts.step_profile import drain, fill

DENSE = "BF16"
ADDED = 0.05
"""Factor of the weights that write into the residual stream, `WRITERS`."""
WRITERS = (".o.weight", "down.weight", "attn_post_norm.weight", "ffn_post_norm.weight")
COUNTED_STEPS = 16
SCORED_AT_ONCE = 8

DECODE_OPS = (
    "linear",
    "head_linear",
    "router",
    "experts",
    "attention_decode",
    "latent_attention",
    *RECURRENCE_OPS.values(),
)
"""The ops whose kernels a row names."""


class SpreadSource(RandomSource):
    """Random weights whose tokens keep hidden states of their own."""

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        outer = super().outer()
        embed_VD = outer["embed.weight"]
        assert isinstance(embed_VD, Tensor)
        return outer | {"embed.weight": embed_VD * embed_VD.shape[1] ** 0.5}

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        layer = super().layer(layer_idx)
        return {
            name: _scaled(_centred(value), ADDED if name.endswith(WRITERS) else 1.0)
            for name, value in layer.items()
        }


def _centred(value: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
    """Return integer codes with the mean 0. Uniform ones from -8 to 7 have the mean -0.5, by which all
    outputs of a linear move alike, and after some layers all tokens."""
    if isinstance(value, Tensor) or value.scheme.min_code == -value.scheme.max_code:
        return value
    codes_OI = value.codes_OI
    return replace(value, codes_OI=codes_OI.masked_fill(codes_OI == value.scheme.min_code, 0))


def _scaled(value: Tensor | QuantizedWeight, factor: float) -> Tensor | QuantizedWeight:
    if isinstance(value, Tensor):
        return value * factor
    return replace(value, scale_OG=value.scale_OG * factor)


@contextmanager
def routed() -> Iterator[list[Tensor]]:
    """Collect the ids [T, K] of every router that runs eagerly, in the order of the calls."""
    found: list[Tensor] = []
    route = ExpertLinears.route

    def recorded(
        experts: ExpertLinears, x_TD: Tensor, phase: Phase, tokens_T: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        ids_TK, weights_TK = route(experts, x_TD, phase, tokens_T)
        found.append(ids_TK.clone())
        return ids_TK, weights_TK

    ExpertLinears.route = recorded  # type: ignore[method-assign]
    try:
        yield found
    finally:
        ExpertLinears.route = route  # type: ignore[method-assign]


def experts_hit(engine: Engine, batch_sizes: list[int], prompt_tokens: int) -> dict[int, float]:
    """Return, for each batch size, the mean number of experts that a decode step hits in a layer."""
    generator = torch.Generator().manual_seed(2)
    size = (max(batch_sizes), prompt_tokens)
    prompts = torch.randint(engine.arch.vocab_size, size, generator=generator).tolist()
    params = SamplingParams(max_tokens=COUNTED_STEPS, ignore_eos=True)
    for idx, prompt in enumerate(prompts):
        engine.add(Request(str(idx), tuple(prompt), params))
    outputs: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        outputs |= {each.id: each.tokens for each in engine.step()}
    sequences = torch.tensor([[*prompt, *outputs[str(idx)]] for idx, prompt in enumerate(prompts)])
    by_layer: list[list[Tensor]] = []
    for part in sequences.split(SCORED_AT_ONCE):
        with routed() as found, torch.inference_mode():
            engine.runner.score(part)
        by_layer.append([ids.view(*part.shape, -1)[:, -COUNTED_STEPS:].cpu() for ids in found])
    layers = [torch.cat(parts) for parts in zip(*by_layer, strict=True)]
    return {
        size: statistics.fmean(
            ids_BSK[:size, step].unique().numel() for ids_BSK in layers for step in range(COUNTED_STEPS)
        )
        for size in batch_sizes
    }


def step_bytes(engine: Engine, hit: float, batch_size: int, context: int) -> float:
    """Return the bytes that a decode step moves, with `hit` experts in every mixture."""
    of_request = context * engine.kv_bytes_per_token + engine.arch.step_state_bytes
    return engine.weight_bytes_read(hit) + batch_size * of_request


class Bench:
    """The conditions of a run and what it has measured so far."""

    def __init__(self, args: argparse.Namespace, name: str, arch: Arch, device: torch.device) -> None:
        self.args = args
        self.name = name
        self.arch = arch
        self.device = device
        self.bandwidth = measure_bandwidth(device, size_bytes=1 << 26 if device.type == "cpu" else None)
        self.rows: list[dict[str, Any]] = []
        self.profiles: list[dict[str, Any]] = []

    def serve(self, scheme: str) -> None:
        """All rows of one scheme, by one engine."""
        args = self.args
        started_s = time.perf_counter()
        engine = self._engine(scheme)
        loaded_s = time.perf_counter() - started_s
        hits = experts_hit(engine, args.batch_sizes, args.prompt_tokens)
        for batch_size in args.batch_sizes:
            self._measure(engine, scheme, batch_size, args.prompt_tokens, hits[batch_size])
        self._measure(engine, scheme, 1, args.ttft_tokens, hits[min(hits)], output_tokens=2)
        if args.profile:
            for batch_size in args.batch_sizes:
                fill(engine, batch_size, args.prompt_tokens, args.output_tokens)
                facts = {"scheme": scheme, "batch_size": batch_size}
                self.profiles.append(facts | profile_steps(engine, steps=4).as_json())
                drain(engine)
        took_s = time.perf_counter() - started_s
        done = f"{scheme}: loaded in {loaded_s:.1f} s, measured in {took_s:.1f} s"
        print(done, file=sys.stderr, flush=True)

    def _engine(self, scheme: str) -> Engine:
        args = self.args
        dtype = model_dtype(self.device)
        source = SpreadSource(
            self.arch,
            device=self.device,
            dtype=dtype,
            scheme=schemes_of(scheme)[0],
        )
        config = EngineConfig(
            dtype=dtype,
            max_batch_size=max(args.batch_sizes),
            max_model_len=max(args.prompt_tokens, args.ttft_tokens) + args.output_tokens,
            max_step_tokens=max(args.ttft_tokens, max(args.batch_sizes) * args.prompt_tokens),
        )
        return Engine(source, device=self.device, config=config)

    def _measure(
        self,
        engine: Engine,
        scheme: str,
        batch_size: int,
        prompt_tokens: int,
        hit: float,
        *,
        output_tokens: int | None = None,
    ) -> None:
        output_tokens = output_tokens or self.args.output_tokens
        conditions = LatencyConditions(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            repeats=self.args.repeats,
            warmups=1,
            vocab_size=self.arch.vocab_size,
            bandwidth_bytes_per_s=self.bandwidth,
            seed=0,
        )
        (row,) = measure_latency(engine, conditions, batch_sizes=[batch_size])
        measured = row.as_json()
        num_bytes = step_bytes(engine, hit, batch_size, prompt_tokens + output_tokens // 2)
        times = {
            f"{name}_ms_{part}": measured[f"{name}_ms_{part}"]
            for name in ("ttft", "tpot")
            for part in ("p50", "p50_lower", "p50_upper", "p95")
        }
        kernels = {
            each["kernel"]
            for each in engine.kernel_report()
            if each["phase"] == "decode" and each["op"] in DECODE_OPS
        }
        self.rows.append(
            {
                "tool": "compress",
                "shape": self.name,
                "scheme": scheme,
                "batch_size": batch_size,
                "prompt_tokens": prompt_tokens,
                "output_tokens": output_tokens,
                "repeats": self.args.repeats,
                **times,
                "experts_hit": hit,
                "step_bytes": num_bytes,
                "floor_ms": num_bytes / self.bandwidth * 1e3,
                "kernels": sorted(kernels),
            }
        )


def tables(rows: Sequence[dict[str, Any]], profiles: Sequence[dict[str, Any]]) -> str:
    """The rows, then where the time of a step went."""
    header = ["scheme", "batch", "prompt", "TTFT ms", "TPOT ms", "floor ms", "TPOT / floor", "experts hit"]
    body = [
        [
            row["scheme"],
            str(row["batch_size"]),
            str(row["prompt_tokens"]),
            f"{row['ttft_ms_p50']:.2f}",
            f"{row['tpot_ms_p50']:.3f}",
            f"{row['floor_ms']:.3f}",
            f"{row['tpot_ms_p50'] / row['floor_ms']:.2f}",
            f"{row['experts_hit']:.1f}",
        ]
        for row in rows
    ]
    blocks = [markdown(header, body)]
    for each in profiles:
        lines = [
            [
                kernel["name"][:60],
                f"{kernel['count']:.1f}",
                f"{kernel['own_us']:.1f}",
                f"{kernel['share']:.1%}",
            ]
            for kernel in each["kernels"][:14]
        ]
        title = f"{each['scheme']}, batch {each['batch_size']}: step {each['wall_us']:.0f} us, "
        title += f"device idle {each['idle_us']:.0f} us"
        blocks.append(f"{title}\n{markdown(['kernel', 'a step', 'us', 'share'], lines)}")
    return "\n\n".join(blocks)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.set_defaults(model="qwen3-30b-a3b")
    parser.add_argument("--schemes", nargs="+", type=scheme_text, default=["W4A16_G128", "FP8_BLOCK", DENSE])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--ttft-tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="also say which kernels a step goes to")
    args = parse_arguments(parser, lambda document: tables(document["rows"], document.get("profiles", [])))
    name, arch = read_arch(args.model)
    bench = Bench(args, name, arch, pick_device())
    try:
        for scheme in args.schemes:
            bench.serve(scheme)
            gc.collect()
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()
    finally:  # what was measured before a failure is kept
        if args.out is not None:
            write_results(
                args.out,
                bench.rows,
                device=bench.device,
                commit=args.commit,
                facts={"bandwidth_bytes_per_s": bench.bandwidth, "profiles": bench.profiles},
            )
    print(tables(bench.rows, bench.profiles))


if __name__ == "__main__":
    main()
