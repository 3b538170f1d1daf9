"""How much memory scoring takes of a model that is larger than the memory: random weights on disk, scored
layer by layer in a process of its own, its peak resident size beside what `compress plan` says.

    python -m scripts.bench_streamed --out benchmarks/streamed.json

The shape is that of a model of 70 billion parameters with its first layers only, so that disk and time
suffice; a model with all of them takes no more memory, because one layer is held at a time. Needs 20 GB of
disk and 16 GB of memory as it stands; `--model`, `--layers` and `--seq-len` make it smaller.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from compress.models.checkpoint_writer import write_checkpoint
from compress.models.random_source import RandomSource
from compress.stages import PlanFacts
from compress.stages.validate.apart_estimate import apart_needs
from compress.stages.validate.spec import Validate
from scripts.bench_setup import argument_parser, markdown, parse_arguments, read_arch, write_results
from tests.support.streamed_peak import peak_bytes_of_scoring

CPU = torch.device("cpu")


def measure(args: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Write a checkpoint, score it, and return the row."""
    name, whole = read_arch(args.model)
    arch = replace(whole, layers=whole.layers[: args.layers])
    model = place / "model"
    model.mkdir()
    started_s = time.perf_counter()
    write_checkpoint(model, RandomSource(arch, device=CPU, dtype=torch.bfloat16))
    written_s = time.perf_counter() - started_s
    print(f"{name}, {len(arch.layers)} layers: written in {written_s:.0f} s", file=sys.stderr, flush=True)
    spec = Validate(
        num_samples=args.num_samples,
        seq_len=args.seq_len,
        latency=None,
        speculative=None,
        apart={"streamed": True, "top_k": args.top_k},
    )
    need = apart_needs(spec, arch, arch, PlanFacts(arch, "cpu", {}), num_kept=1)
    started_s = time.perf_counter()
    peak_bytes = peak_bytes_of_scoring(model, spec.model_dump_json(), "streamed", place / "kept")
    scored_s = time.perf_counter() - started_s
    return {
        "tool": "compress",
        "shape": name,
        "num_layers": len(arch.layers),
        "num_params": arch.num_params,
        "checkpoint_bytes": sum(each.stat().st_size for each in model.rglob("*.safetensors")),
        "num_samples": args.num_samples,
        "seq_len": args.seq_len,
        "top_k": args.top_k,
        "planned_bytes": need.source_bytes,
        "peak_bytes": peak_bytes,
        "loaded_bytes": 4 * arch.num_params,
        "read_bytes": need.read_bytes,
        "seconds": scored_s,
    }


def tables(row: Mapping[str, Any]) -> str:
    """Return the row in gigabytes."""
    header = ["shape", "layers", "on disk", "planned", "peak", "loaded it would be", "seconds"]
    sizes = (row[key] for key in ("checkpoint_bytes", "planned_bytes", "peak_bytes", "loaded_bytes"))
    cells = [f"{each / 1e9:.2f} GB" for each in sizes]
    return markdown(header, [[row["shape"], str(row["num_layers"]), *cells, f"{row['seconds']:.0f}"]])


def main() -> None:
    parser = argument_parser(__doc__)
    parser.set_defaults(model="llama-3.1-70b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--num-samples", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--place", type=Path, default=None, help="a directory on a disk with room")
    args = parse_arguments(parser, lambda document: tables(document["rows"][0]))
    with tempfile.TemporaryDirectory(dir=args.place) as place:
        row = measure(args, Path(place))
    if args.out is not None:
        write_results(args.out, [row], device=CPU, commit=args.commit, facts={})
    print(tables(row))


if __name__ == "__main__":
    main()
