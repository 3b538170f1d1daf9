"""Accuracy and memory of a quantized model whose source fits neither the GPU beside it nor the disk: layers
of the source are made one at a time where they are scored, and where the candidate is rounded from them.

    python -m scripts.bench_in_place --out benchmarks/h200/in_place.json

Weights are random (`models/random_source.py`), and a layer is the same whenever it is made, so that it need
not be kept: the source's likeliest tokens are scored by streaming, as `validate: {apart: {streamed: true}}`
does with a checkpoint on disk, and the candidate, rounded to the nearest codes of the scheme, is loaded and
compared with them. Peaks are of the GPU's allocations, beside what `compress plan` says. KL and agreement
are of random weights, and say only that both models were computed.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.models.arch import Arch
from compress.models.random_source import RandomSource
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import QuantizedWeight, Scheme, scheme_named
from compress.runtime.engine import Engine
from compress.runtime.streamed_model import StreamedModel
from compress.stages import PlanFacts
from compress.stages.quantize.spec import Quantize
from compress.stages.validate.apart_estimate import apart_needs
from compress.stages.validate.spec import Validate
from compress.validate.kept_scores import KeptScores, compare_kept
from scripts.bench_setup import (
    argument_parser,
    markdown,
    model_dtype,
    parse_arguments,
    pick_device,
    read_arch,
    write_results,
)


class Rounded:
    """A `WeightSource` whose linears are rounded from another's whenever a layer is asked for. Tensors are
    made on the GPU, so that its peak has what a checkpoint's would take of the CPU: embedding and head as
    they are read, and a layer while it is rounded."""

    kv_format = None

    def __init__(self, source: RandomSource, scheme: Scheme) -> None:
        self._source = source
        self._scheme = scheme

    @property
    def arch(self) -> Arch:
        return self._source.arch

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self._source.outer()

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        linears = self.arch.layers[layer_idx].linears
        return {
            name: nearest_weight(value.float(), self._scheme, value.dtype)
            if isinstance(value, Tensor) and name.removesuffix(".weight") in linears
            else value
            for name, value in self._source.layer(layer_idx).items()
        }


def peak_after(device: torch.device, start: bool) -> int:
    """Begin to watch the allocations of a GPU, or return their peak since; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    if start:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


def measure(args: argparse.Namespace, place: Path, device: torch.device) -> dict[str, Any]:
    """Score the source, then the candidate, and return the row."""
    name, arch = read_arch(args.model)
    scheme = scheme_named(args.scheme)
    source = RandomSource(arch, device=device, dtype=model_dtype(device))
    spec = Validate(
        num_samples=args.num_samples,
        seq_len=args.seq_len,
        latency=None,
        speculative=None,
        apart={"streamed": True, "top_k": args.top_k},
    )
    quantize = Quantize(scheme=args.scheme, round={"kind": "rtn"})
    need = apart_needs(spec, arch, arch, PlanFacts(arch, device.type, {"quantize": quantize}), num_kept=1)
    generator = torch.Generator().manual_seed(0)
    shape = spec.num_samples, spec.seq_len
    tokens_NS = torch.randint(arch.vocab_size, shape, generator=generator, dtype=torch.int32).to(device)
    batch_size = spec.windows_at_once(arch)
    config = spec.engine_config(speculates=False)
    kept = KeptScores(place, tokens_NS, identity={}, batch_size=batch_size, top_k=args.top_k, log=print)
    started_s = time.perf_counter()
    peak_after(device, start=True)
    kept.fill(StreamedModel(source, device=device, config=config).score(tokens_NS, batch_size=batch_size))
    source_peak = peak_after(device, start=False)
    source_s = time.perf_counter() - started_s
    print(f"source scored in {source_s:.1f} s", file=sys.stderr, flush=True)
    peak_after(device, start=True)
    candidate = Engine(Rounded(source, scheme), device=device, config=config)
    logits = (candidate.runner.score(batch) for batch in tokens_NS.split(batch_size))
    with torch.inference_mode():
        ((_, accuracy),) = compare_kept(
            [kept], logits, tokens_NS, num_bytes=tokens_NS.numel(), batch_size=batch_size
        )
    return {
        "tool": "compress",
        "shape": name,
        "num_layers": arch.num_layers,
        "num_params": arch.num_params,
        "scheme": scheme.name,
        "source_bytes": 2 * arch.num_params,
        "weight_bytes_read": candidate.weight_bytes_read(),
        "num_samples": args.num_samples,
        "seq_len": args.seq_len,
        "top_k": args.top_k,
        "kept_bytes": kept.num_bytes(),
        "planned_kept_bytes": need.kept_bytes,
        "planned_source_bytes": need.source_bytes,
        "source_peak_bytes": source_peak,
        "planned_candidate_bytes": need.candidate_bytes,
        "candidate_peak_bytes": peak_after(device, start=False),
        "source_seconds": source_s,
        "seconds": time.perf_counter() - started_s,
        "kl_mean": accuracy.kl_mean.value,
        "top1": accuracy.top1.value,
    }


def tables(row: Mapping[str, Any]) -> str:
    """Return the row in gigabytes."""
    header = ["shape", "source", "streamed: planned", "peak", "candidate: planned", "peak", "seconds", "KL"]
    sizes = (
        row[key]
        for key in (
            "source_bytes",
            "planned_source_bytes",
            "source_peak_bytes",
            "planned_candidate_bytes",
            "candidate_peak_bytes",
        )
    )
    cells = [f"{each / 1e9:.2f} GB" for each in sizes]
    return markdown(
        header,
        [[f"{row['shape']}, {row['scheme']}", *cells, f"{row['seconds']:.0f}", f"{row['kl_mean']:.4f}"]],
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.set_defaults(model="qwen3-32b")
    parser.add_argument("--scheme", default="W4A16_G128")
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--top-k", type=int, default=64)
    args = parse_arguments(parser, lambda document: tables(document["rows"][0]))
    device = pick_device()
    with tempfile.TemporaryDirectory() as place:
        row = measure(args, Path(place), device)
    if args.out is not None:
        write_results(args.out, [row], device=device, commit=args.commit, facts={})
    print(tables(row))


if __name__ == "__main__":
    main()
