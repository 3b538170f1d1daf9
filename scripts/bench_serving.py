"""How the bundled runtime serves many requests: a fixed workload, prefixes, long prompts among decodes, a
trace.

    python -m scripts.bench_serving --out benchmarks/h200/serving.json
    python -m scripts.bench_serving --workload workload_512.json --experiments workload_512

Weights are random and made on the device (`models/random_source.py`); `A+B` is scheme A with a head in scheme
B. Without `--workload` the requests are drawn by the law of `workload_512`: 512 prompts lognormal around 256
tokens and outputs around 160, seed 20261122, which gives the tokens of that file where the vocabulary has
128,256. Exactly as many tokens are generated as asked, end-of-sequence tokens passed over. A row has the
median over `--repeats`, with the least and the largest of its main numbers; a workload is served once before
them, so that every size of a prefill pass has its graph.

    workload_512  all requests at once: throughput, ITL and use of the cache, by policy and requests at once
    ttft          time to the first token of prompts of `prompt_tokens`, of which `prefix_tokens` are in the
                  prefix cache from earlier requests; `burst` of them arrive at once; with `--heads`, in
                  engines that speculate with such a head of random weights, k = `--k`
    itl_mixed     requests decode, and three prompts of `long_tokens` arrive among them: the time between
                  tokens while a long prompt is prefilled, and the long prompts' time to the first token
    trace         arrivals and lengths of `--trace`; without one, the requests above arrive at `--trace-rate`

Host `plain` is the process as it is, `slow` that of `slow_host.py`: one core, and 50 microseconds more for
each launch.
"""

import argparse
import contextlib
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compress.models.arch import Arch
from compress.models.random_source import RandomSource
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative.speculation import Speculative
from compress.validate.load.arrivals import Traffic
from compress.validate.load.compare import LoadRow, compare_load
from compress.validate.load.engine_target import EngineTarget
from compress.validate.load.lengths import LengthLaw, draw_lengths
from compress.validate.load.served import LoadRun
from compress.validate.load.trace import read_trace
from compress.validate.load.workload import LoadRequest, Workload, draw_requests, replay
from compress.validate.load.workload_file import read_workload
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
from scripts.random_heads import EAGLE3_SCHEME, random_head
from scripts.slow_host import slow_host

DENSE = "dense"
NO_HEAD = "none"
LAW_SEED = 20261122
PROMPT_LAW = LengthLaw(256, 0.9, 16, 2048)
OUTPUT_LAW = LengthLaw(160, 0.8, 8, 1024)
EXPERIMENTS = ("workload_512", "ttft", "itl_mixed", "trace")
HOSTS = ("plain", "slow")
NUM_LONG = 3
NAMES = {
    "req_s": "request_throughput",
    "output_tok_s": "output_throughput",
    "ttft_ms_p50": "median_ttft_ms",
    "ttft_ms_p99": "p99_ttft_ms",
    "itl_ms_p50": "median_itl_ms",
    "itl_ms_p99": "p99_itl_ms",
    "e2el_ms_p50": "median_e2el_ms",
    "kv_utilization": "kv_utilization",
    "cached_tokens": "cached_tokens",
    "preemptions": "preemptions",
}
"""Key of a row here -> key of the load generator."""
SPREAD = ("req_s", "output_tok_s", "itl_ms_p50", "itl_ms_p99")


def host(name: str) -> contextlib.AbstractContextManager[None]:
    """Return the host as it is, or a slower one."""
    return slow_host() if name == "slow" else contextlib.nullcontext()


class Bench:
    """The conditions of a run and the rows so far."""

    def __init__(self, args: argparse.Namespace, name: str, arch: Arch, device: torch.device) -> None:
        self.args = args
        self.name = name
        self.arch = arch
        self.device = device
        self.dtype = model_dtype(device)
        self.workload = self._read_workload()
        self.rows: list[dict[str, Any]] = []

    def measure(self, experiment: str, scheme: str) -> None:
        """Add the rows of one experiment with one scheme."""
        started_s = time.perf_counter()
        {
            "workload_512": self.fixed,
            "ttft": self.first_tokens,
            "itl_mixed": self.mixed,
            "trace": self.traced,
        }[experiment](scheme)
        took_s = time.perf_counter() - started_s
        print(f"{experiment}, {scheme}: {took_s:.1f} s", file=sys.stderr, flush=True)

    def fixed(self, scheme: str) -> None:
        """All requests at once, by size of the batch, policy and host."""
        for max_running in self.args.max_running:
            for policy in self.args.policies:
                engine = self._engine(
                    scheme, max_running, self.workload.longest, self.args.max_step_tokens, policy=policy
                )
                for each in self.args.hosts:
                    row = self._compare(engine, self.workload, each)
                    facts = {"max_running": max_running, "policy": policy, "host": each}
                    self._add("workload_512", scheme, facts | numbers(row))
                del engine
                self._collect()

    def first_tokens(self, scheme: str) -> None:
        """The first token of prompts of which a part is cached, one at a time and in bursts."""
        longest = max(self.args.ttft_tokens) + 2
        for prefix_frac, head in itertools.product(self.args.prefix_fracs, self.args.heads):
            engine = self._engine(
                scheme,
                max(self.args.bursts),
                longest,
                self.args.max_step_tokens,
                prefix_cache=prefix_frac > 0,
                speculative=self._speculative(head, scheme),
            )
            for prompt_tokens in self.args.ttft_tokens:
                prefix_tokens = int(prompt_tokens * prefix_frac)
                for burst in self.args.bursts:
                    for each in self.args.hosts:
                        values_ms, cached = self._ttfts(engine, prompt_tokens, prefix_tokens, burst, each)
                        facts = {
                            "prompt_tokens": prompt_tokens,
                            "prefix_tokens": prefix_tokens,
                            "burst": burst,
                            "head": head,
                        }
                        found = summary("ttft_ms_p50", values_ms) | {"cached_tokens": cached}
                        self._add("ttft", scheme, facts | {"host": each} | found)
            del engine
            self._collect()

    def mixed(self, scheme: str) -> None:
        """The time between tokens while long prompts arrive."""
        args = self.args
        longest = max(args.long_tokens + 2, args.decode_prompt + args.decode_tokens)
        for step_tokens in args.mixed_step_tokens:
            for policy in args.policies:
                engine = self._engine(
                    scheme,
                    args.decodes + NUM_LONG,
                    longest,
                    step_tokens,
                    policy=policy,
                    itl_target_ms=args.itl_target,
                )
                self._mixed_run(engine, seed=0)
                found = [self._mixed_run(engine, seed=1 + each) for each in range(args.repeats)]
                facts = {"policy": policy, "step_tokens": step_tokens, "itl_target_ms": args.itl_target}
                facts |= {"decodes": args.decodes, "long_tokens": args.long_tokens}
                for name in found[0]:
                    facts |= summary(name, [each[name] for each in found])
                self._add("itl_mixed", scheme, facts)
                del engine
                self._collect()

    def traced(self, scheme: str) -> None:
        """Arrivals and lengths of a trace, or Poisson arrivals."""
        args = self.args
        if args.trace is None:
            workload = self.workload.under(Traffic(args.trace_rate), seed=LAW_SEED)
        else:
            trace = read_trace(args.trace, num_requests=args.num_requests, rate_scale=args.trace_scale)
            workload = replay(trace, vocab_size=self.arch.vocab_size, seed=LAW_SEED)
        for policy in args.policies:
            engine = self._engine(
                scheme, max(args.max_running), workload.longest, args.max_step_tokens, policy=policy
            )
            for each in args.hosts:
                row = self._compare(engine, workload, each)
                facts = {"trace": workload.name, "policy": policy, "host": each}
                facts |= {"request_rate": workload.request_rate, "max_running": max(args.max_running)}
                self._add("trace", scheme, facts | numbers(row))
            del engine
            self._collect()

    def _read_workload(self) -> Workload:
        args = self.args
        if args.workload is not None:
            whole = read_workload(args.workload, traffic=Traffic())
            return whole.cut(args.num_requests)
        scale = args.length_scale
        lengths = draw_lengths(
            args.num_requests,
            prompt=scaled(PROMPT_LAW, scale),
            output=scaled(OUTPUT_LAW, scale),
            seed=LAW_SEED,
        )
        requests = draw_requests(lengths, vocab_size=self.arch.vocab_size, seed=LAW_SEED)
        return Workload("law of workload_512", requests, None, Traffic(), "offline")

    def _engine(
        self, scheme: str, max_running: int, longest: int, step_tokens: int, **options: Any
    ) -> Engine:
        linears, head = schemes_of(scheme)
        source = RandomSource(
            self.arch,
            device=self.device,
            dtype=self.dtype,
            scheme=linears,
            head_scheme=head,
        )
        config = EngineConfig(
            dtype=self.dtype,
            max_batch_size=max_running,
            max_model_len=longest,
            max_step_tokens=max(step_tokens, max_running),
            kv_format=self.args.kv_format,
            **options,
        )
        return Engine(source, device=self.device, config=config)

    def _speculative(self, head: str, scheme: str) -> Speculative | None:
        """Return how to speculate with a head; that of a dense model is dense, and so is every MTP head."""
        if head == NO_HEAD:
            return None
        own = EAGLE3_SCHEME if head == "eagle3" and scheme != DENSE else DENSE
        options = random_head(head, self.arch, own, device=self.device, dtype=self.dtype)
        return Speculative(options, k=self.args.k)

    def _compare(self, engine: Engine, workload: Workload, host_name: str) -> LoadRow:
        target = EngineTarget(engine, self.name)
        with host(host_name):
            (row,) = compare_load(
                {self.name: target},
                lambda repeat: workload,
                repeats=self.args.repeats,
                warmup=workload,  # every size of a prefill pass has its graph afterwards
            )
        return row

    def _ttfts(
        self, engine: Engine, prompt_tokens: int, prefix_tokens: int, burst: int, host_name: str
    ) -> tuple[list[float], int]:
        """Return the median TTFT of each repeat in ms and the cached tokens of a request; a repeat has a
        prefix of its own, which two requests before it put into the cache: of a model with states the second
        leaves that of the prefix.
        """
        target = EngineTarget(engine, self.name)
        values_ms: list[float] = []
        cached = 0
        with host(host_name):
            for repeat in range(-1, self.args.ttft_repeats):
                rng = np.random.default_rng([7, prompt_tokens, prefix_tokens, burst, repeat + 1])
                high = self.arch.vocab_size - 10
                prefix = rng.integers(10, high, size=prefix_tokens).tolist()
                size = prompt_tokens - prefix_tokens
                requests = tuple(
                    LoadRequest(tuple(prefix + rng.integers(10, high, size=size).tolist()), 2)
                    for _ in range(burst + 2)
                )
                whole = Workload("ttft", requests, None, Traffic(), "offline")
                if prefix_tokens:
                    for each in requests[:2]:
                        target.run(replace(whole, requests=(each,)))
                run = target.run(replace(whole, requests=requests[2:]))
                if repeat >= 0:  # the first one is the warm-up
                    values_ms.append(statistics.median(first_ms(run)))
                    cached = run.served[0].cached_tokens
        return values_ms, cached

    def _mixed_run(self, engine: Engine, *, seed: int) -> dict[str, float]:
        """Return ITL with and without a long prompt in the batch, and the long prompts' TTFT, in ms."""
        args = self.args
        rng = np.random.default_rng([5, seed])
        done = []

        def add(name: str, num_prompt: int, num_output: int) -> None:
            prompt = tuple(rng.integers(10, self.arch.vocab_size - 10, size=num_prompt).tolist())
            engine.add(Request(name, prompt, SamplingParams(max_tokens=num_output, ignore_eos=True)))

        for idx in range(args.decodes):
            add(f"d{idx}", args.decode_prompt, args.decode_tokens)
        every = args.decode_tokens // (NUM_LONG + 3)
        arrivals = [every * (each + 1) for each in range(NUM_LONG)]
        num_steps = 0
        while engine.has_work or arrivals:
            if arrivals and num_steps >= arrivals[0]:
                add(f"L{arrivals.pop(0)}", args.long_tokens, 2)
            if not arrivals:
                engine.flush()
            done += engine.step()
            num_steps += 1
        long = [each for each in done if each.id.startswith("L")]
        spans = [(each.arrival_s, each.token_times_s[0]) for each in long]
        inside: list[float] = []
        outside: list[float] = []
        for each in (each for each in done if each.id.startswith("d")):
            for earlier, later in zip(each.token_times_s, each.token_times_s[1:], strict=False):
                during = any(begin <= later and earlier <= end for begin, end in spans)
                (inside if during else outside).append((later - earlier) * 1e3)
        return {
            "itl_ms_p50": statistics.median(inside or [0.0]),
            "itl_ms_max": max(inside, default=0.0),
            "itl_ms_p50_alone": statistics.median(outside or [0.0]),
            "long_ttft_ms": statistics.median((end - begin) * 1e3 for begin, end in spans),
        }

    def _add(self, experiment: str, scheme: str, found: dict[str, Any]) -> None:
        shown = scheme.replace(DENSE, {torch.bfloat16: "BF16", torch.float32: "F32"}[self.dtype])
        row = {"experiment": experiment, "tool": "compress", "shape": self.name, "scheme": shown, **found}
        self.rows.append(row)
        print(row, file=sys.stderr, flush=True)

    def _collect(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def scaled(law: LengthLaw, scale: float) -> LengthLaw:
    """Return a law with all lengths multiplied, for tests of a small shape."""
    if scale == 1.0:
        return law
    least, median, most = (max(round(each * scale), 1) for each in (law.least, law.median, law.most))
    return LengthLaw(median, law.spread, least, most)


def first_ms(run: LoadRun) -> list[float]:
    """Return TTFT of every request in ms."""
    return [(each.token_times_s[0] - each.arrival_s) * 1e3 for each in run.completed]


def summary(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the median of repeats under `name`, with the least and the largest."""
    return {name: statistics.median(values), f"{name}_least": min(values), f"{name}_largest": max(values)}


def numbers(row: LoadRow) -> dict[str, Any]:
    """Return the numbers of a load under the names of the result file."""
    found: dict[str, Any] = {name: row.median(key) for name, key in NAMES.items()}
    for name in SPREAD:
        values = [each[NAMES[name]] for each in row.repeats]
        found |= {f"{name}_least": min(values), f"{name}_largest": max(values)}
    found |= {key: row.conditions[key] for key in ("num_prompts", "input_tokens_digest")}
    return found | {
        "failed": row.median("failed"),
        "repeats": len(row.repeats),
        "instability": row.instability,
    }


COLUMNS = {
    "workload_512": (
        *("scheme", "max_running", "policy", "host", "req_s", "output_tok_s"),
        *("itl_ms_p50", "itl_ms_p99", "kv_utilization", "cached_tokens"),
    ),
    "ttft": (
        *("scheme", "prompt_tokens", "prefix_tokens", "burst", "head", "host"),
        *("ttft_ms_p50", "cached_tokens"),
    ),
    "itl_mixed": (
        *("scheme", "policy", "step_tokens", "itl_ms_p50_alone", "itl_ms_p50", "itl_ms_max", "long_ttft_ms"),
    ),
    "trace": (
        *("scheme", "trace", "policy", "host", "request_rate", "req_s", "output_tok_s"),
        *("e2el_ms_p50", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99"),
    ),
}


def tables(document: dict[str, Any]) -> str:
    """Return what was measured on what, and a table an experiment."""
    versions = ", ".join(f"{name} {value}" for name, value in document["versions"].items() if value)
    blocks = [f"{document['device']}, driver {document['driver']}, {versions}"]
    for experiment, columns in COLUMNS.items():
        rows = [row for row in document["rows"] if row["experiment"] == experiment]
        if rows:
            blocks.append(
                f"{experiment}\n{markdown(columns, [[cell(row, name) for name in columns] for row in rows])}"
            )
    return "\n\n".join(blocks)


def cell(row: dict[str, Any], name: str) -> str:
    """Return one number with its range over repeats, where it has one; older files lack some of them."""
    value = row.get(name, "-")
    if not isinstance(value, float):
        return str(value)
    spread = (
        f" ({row[f'{name}_least']:.4g} to {row[f'{name}_largest']:.4g})" if f"{name}_least" in row else ""
    )
    return f"{value:.4g}{spread}"


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--experiments", nargs="+", default=list(EXPERIMENTS), choices=EXPERIMENTS)
    parser.add_argument(
        "--schemes", nargs="+", type=scheme_text, default=["W4A16_G128+FP8_DYNAMIC", "FP8_DYNAMIC", DENSE]
    )
    parser.add_argument("--workload", type=Path, default=None, help="a workload file")
    parser.add_argument("--num-requests", type=int, default=512)
    parser.add_argument("--length-scale", type=float, default=1.0, help="of the law, for small shapes")
    parser.add_argument("--max-running", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--policies", nargs="+", default=["continuous", "static", "dynamic"])
    parser.add_argument("--hosts", nargs="+", default=list(HOSTS), choices=HOSTS)
    parser.add_argument("--max-step-tokens", type=int, default=8192)
    parser.add_argument("--kv-format", default=None)
    parser.add_argument("--ttft-tokens", nargs="+", type=int, default=[1088, 4096])
    parser.add_argument("--prefix-fracs", nargs="+", type=float, default=[0.0, 0.94])
    parser.add_argument("--bursts", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--heads", nargs="+", default=[NO_HEAD], choices=[NO_HEAD, "eagle3", "mtp"])
    parser.add_argument("--k", type=int, default=3, help="proposals of a head a step")
    parser.add_argument("--ttft-repeats", type=int, default=8)
    parser.add_argument("--mixed-step-tokens", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument(
        "--itl-target", type=float, default=None, help="itl_target_ms of the engine in itl_mixed"
    )
    parser.add_argument("--decodes", type=int, default=32)
    parser.add_argument("--decode-prompt", type=int, default=512)
    parser.add_argument("--decode-tokens", type=int, default=400)
    parser.add_argument("--long-tokens", type=int, default=8192)
    parser.add_argument(
        "--trace", type=Path, default=None, help="CSV or JSONL; see compress/validate/load/trace.py"
    )
    parser.add_argument("--trace-scale", type=float, default=1.0)
    parser.add_argument("--trace-rate", type=float, default=16.0, help="requests a second without --trace")
    parser.add_argument("--repeats", type=int, default=3)
    args = parse_arguments(parser, tables)
    name, arch = read_arch(args.model)
    bench = Bench(args, name, arch, pick_device())
    try:
        for scheme in args.schemes:
            for experiment in args.experiments:
                bench.measure(experiment, scheme)
    finally:  # what was measured before a failure is kept
        document = write_results(
            args.out,
            bench.rows,
            device=bench.device,
            commit=args.commit,
            facts={"workload": bench.workload.name, "workload_digest": bench.workload.digest},
        )
    print(tables(document))


if __name__ == "__main__":
    main()
