"""How long quantizing takes on this device, from a checkpoint on disk to an artifact on disk, and how much of the device's memory.

    python scripts/bench_quantize.py --out benchmarks/h200/quantize.json
    python scripts/bench_quantize.py --layers 2 --methods gptq awq          # a quick look

The checkpoint has the named shape and random weights, the calibration set random tokens: time depends on shapes, not values. Timed is the
quantize stage, with reading the checkpoint and writing the artifact, and then the digests that become its manifest. `--layers` cuts the
model; a layer's share is in the rows. Disk: twice the model, about 22 GB for an 8B shape.
"""

import gc
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench_setup import argument_parser, markdown, model_dtype, pick_device, read_arch, write_results

from compress.artifact.context import Context
from compress.artifact.manifest import describe_files
from compress.artifact.workspace import ArtifactWriter
from compress.calibrate.dataset import TokenSet, save_token_set
from compress.models.arch import Arch
from compress.models.checkpoint import write_checkpoint
from compress.models.random_source import RandomSource
from compress.registry.model_source import ModelSource
from compress.stages import STAGES, Input, Inputs, Port
from compress.stages.calibrate import TOKENS_NAME

METHODS: dict[str, dict[str, Any]] = {
    "gptq": {"scheme": "W4A16_G128", "round": {"kind": "gptq"}},
    "awq": {"scheme": "W4A16_G128", "smooth": {"kind": "awq"}, "round": {"kind": "rtn"}},
    "awq+gptq": {"scheme": "W4A16_G128", "smooth": {"kind": "awq"}, "round": {"kind": "gptq"}},
    "balanced": {"scheme": "W4A16_G128", "preset": "balanced"},
    "fp8-static": {"scheme": "FP8_STATIC", "round": {"kind": "rtn"}},
}


def cut(arch: Arch, num_layers: int | None) -> Arch:
    """The first layers only."""
    if num_layers is None:
        return arch
    return replace(arch, layers=arch.layers[:num_layers], config={**arch.config, "num_hidden_layers": num_layers})


def build(directory: Path, arch: Arch, device: torch.device, num_samples: int, seq_len: int) -> None:
    """The checkpoint and the tokens."""
    (directory / "model").mkdir()
    write_checkpoint(directory / "model", RandomSource(arch, device=device, dtype=torch.bfloat16))
    tokens = torch.randint(arch.vocab_size, (num_samples, seq_len), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    (directory / "tokens").mkdir()
    save_token_set(TokenSet(tokens, 0, 0, {}), directory / "tokens" / TOKENS_NAME)


def quantize(directory: Path, spec: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Seconds of the stage and of the digests; bytes of the device at most, and of the artifact."""
    stage = STAGES.get("quantize")
    for name in ("scratch", "out"):
        shutil.rmtree(directory / name, ignore_errors=True)
        (directory / name).mkdir()
    inputs = Inputs(
        ModelSource(directory / "model", "random", None, ""),
        {Port.DENSE: Input(directory / "model", ""), Port.CALIB: Input(directory / "tokens", "")},
    )
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    started_s = time.perf_counter()
    stage.run(stage.spec.model_validate(spec), inputs, ArtifactWriter(directory / "out"), Context(str(device), 0, directory / "scratch"))
    stage_s = time.perf_counter() - started_s
    files, _ = describe_files(directory / "out")
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    total_s = time.perf_counter() - started_s
    return {"stage_s": stage_s, "seconds": total_s, "peak_device_bytes": peak, "artifact_bytes": sum(each.size_bytes for each in files)}


def table(rows: list[dict[str, Any]]) -> str:
    header = ["method", "layers", "s", "of it digests", "s a layer", "peak GB", "artifact GB"]
    lines = [
        [
            row["method"],
            str(row["num_layers"]),
            f"{row['seconds']:.1f}",
            f"{row['seconds'] - row['stage_s']:.1f}",
            f"{row['seconds'] / row['num_layers']:.2f}",
            "" if row["peak_device_bytes"] is None else f"{row['peak_device_bytes'] / 1e9:.1f}",
            f"{row['artifact_bytes'] / 1e9:.2f}",
        ]
        for row in rows
    ]
    return markdown(header, lines)


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--layers", type=int, default=None, help="of the model; all by default")
    parser.add_argument("--num-samples", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--scratch", type=Path, default=None, help="a directory on the disk that is to be measured")
    args = parser.parse_args()
    device = pick_device()
    name, arch = read_arch(args.model)
    arch = cut(arch, args.layers)
    rows = []
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        build(Path(scratch), arch, device, args.num_samples, args.seq_len)
        for method in args.methods:
            measured = quantize(Path(scratch), METHODS[method], device)
            facts = {"shape": name, "num_layers": arch.num_layers, "num_samples": args.num_samples, "seq_len": args.seq_len}
            rows.append({"method": method, **facts, **measured})
            print(f"{method}: {measured['seconds']:.1f} s", flush=True)
            if args.out is not None:
                write_results(
                    args.out, rows, device=device, commit=args.commit, facts={"dtype": str(model_dtype(device)).removeprefix("torch.")}
                )
    print(table(rows))


if __name__ == "__main__":
    main()
