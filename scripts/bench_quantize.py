"""How long quantizing takes on this device, from a checkpoint on disk to an artifact on disk, and how much of
the device's memory.

    python -m scripts.bench_quantize --out benchmarks/h200/quantize.json
    python -m scripts.bench_quantize --layers 2 --methods gptq awq          # a quick look
    python -m scripts.bench_quantize --methods gptq --tools llmcompressor-gptq --peer-layers 4
        # and another tool on the same GPU

The checkpoint has the named shape and random weights, the calibration set random tokens: time depends on
shapes, not values. Timed is the quantize stage, with reading the checkpoint and writing the artifact, and
then the digests that become its manifest. `--methods copy` copies the checkpoint on that disk and syncs it,
to compare with methods that run no layer (`fp8-dynamic`, `rtn`). `--layers` cuts the model; a layer's share
is in the rows. Disk: twice the model, about 22 GB for an 8B shape, and 32 GB with `copy`.

`--tools` are measured behind it, in a process of their own, on the same checkpoint and tokens: the quantizing
call alone, without reading and writing (`peer_speed.py`). They must be installed beside torch where `--peers`
says, here by default. With `--peer-layers N` they quantize one layer, one again and N, and their row is the
first run plus, for each further layer of the model, what a layer more took in the last two; `measured` has
the runs, and the table marks the row.
"""

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from compress.artifact.atomic import sync_tree
from compress.artifact.manifest import describe_files
from compress.artifact.writer import ArtifactWriter
from compress.context import Context
from compress.data.model_tokens import TOKENS_NAME
from compress.data.tokens import TokenSet, save_token_set
from compress.models.arch import Arch
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.random_source import RandomSource
from compress.registry.model_source import BUILTIN, ModelSource
from compress.stages import STAGES, Input, Inputs, Port
from scripts.bench_setup import (
    argument_parser,
    markdown,
    model_dtype,
    parse_arguments,
    pick_device,
    read_arch,
    write_results,
)

METHODS: dict[str, dict[str, Any]] = {
    "gptq": {"scheme": "W4A16_G128", "round": {"kind": "gptq"}},
    "awq": {"scheme": "W4A16_G128", "smooth": {"kind": "awq"}, "round": {"kind": "rtn"}},
    "awq+gptq": {"scheme": "W4A16_G128", "smooth": {"kind": "awq"}, "round": {"kind": "gptq"}},
    "balanced": {"scheme": "W4A16_G128", "preset": "balanced"},
    "fp8-static": {"scheme": "FP8_STATIC", "round": {"kind": "rtn"}},
    "fp8-dynamic": {"scheme": "FP8_DYNAMIC", "round": {"kind": "rtn"}},
    "rtn": {"scheme": "W4A16_G128", "round": {"kind": "rtn"}},
}
COPY = "copy"
"""Method of the row that copies the checkpoint."""
TOOLS = ("llmcompressor-gptq", "llmcompressor-awq", "llmcompressor-awq+gptq")


def cut(arch: Arch, num_layers: int | None) -> Arch:
    """The first layers only."""
    if num_layers is None:
        return arch
    return replace(
        arch, layers=arch.layers[:num_layers], config={**arch.config, "num_hidden_layers": num_layers}
    )


def build(directory: Path, arch: Arch, device: torch.device, num_samples: int, seq_len: int) -> None:
    """The checkpoint, with a tokenizer because other tools ask for one, and the tokens."""
    (directory / "model").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN["reference"] / name, directory / "model" / name)
    write_checkpoint(directory / "model", RandomSource(arch, device=device, dtype=torch.bfloat16))
    tokens = torch.randint(
        arch.vocab_size, (num_samples, seq_len), generator=torch.Generator().manual_seed(0), dtype=torch.int32
    )
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
    stage.run(
        stage.spec.model_validate(spec),
        inputs,
        ArtifactWriter(directory / "out"),
        Context(str(device), 0, directory / "scratch"),
    )
    stage_s = time.perf_counter() - started_s
    files, _ = describe_files(directory / "out")
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    total_s = time.perf_counter() - started_s
    return {
        "stage_s": stage_s,
        "seconds": total_s,
        "peak_device_bytes": peak,
        "artifact_bytes": sum(each.size_bytes for each in files),
    }


def copy(directory: Path) -> dict[str, Any]:
    """Seconds of copying the checkpoint as `cp` does, and of a sync of the copy."""
    copied = directory / "copied"
    shutil.rmtree(copied, ignore_errors=True)
    started_s = time.perf_counter()
    subprocess.run(["cp", "-r", str(directory / "model"), str(copied)], check=True)
    copied_s = time.perf_counter() - started_s
    sync_tree(copied)
    total_s = time.perf_counter() - started_s
    size = sum(each.stat().st_size for each in copied.iterdir())
    shutil.rmtree(copied)
    return {"copied_s": copied_s, "seconds": total_s, "peak_device_bytes": None, "artifact_bytes": size}


def quantize_elsewhere(
    directory: Path, tool: str, python: Path, device: torch.device, arch: Arch, peer_layers: int | None
) -> dict[str, Any]:
    """Seconds of another tool's call and bytes of the device at most.

    Raises:
        RuntimeError: the tool failed; the end of what it said.
    """
    layers = (
        [arch.num_layers] if peer_layers is None or peer_layers >= arch.num_layers else [1, 1, peer_layers]
    )
    question = directory / "question.json"
    answer = directory / "answer.json"
    paths = {"model": str(directory / "model"), "tokens": str(directory / "tokens" / TOKENS_NAME)}
    question.write_text(json.dumps({"tool": tool, **paths, "device": str(device), "layers": layers}))
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    command = [str(python), str(Path(__file__).parent / "peer_speed.py"), str(question), str(answer)]
    done = subprocess.run(
        command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{tool} failed (exit code {done.returncode}); the end of what it said:\n{done.stderr[-4000:]}"
        )
    said = json.loads(answer.read_text())
    measured = [{"layers": num_layers, **run} for num_layers, run in zip(layers, said["runs"], strict=True)]
    return {
        "tool": f"{said['package']} {said['versions'][said['package']]}",
        "method": said["method"],
        "seconds": whole_seconds([(each["layers"], each["seconds"]) for each in measured], arch.num_layers),
        "peak_device_bytes": measured[-1]["peak_device_bytes"],
        "measured": measured,
        "versions": said["versions"],
    }


def whole_seconds(runs: list[tuple[int, float]], num_layers: int) -> float:
    """Of all layers, from runs of so many layers each that took so long: of the one, or of the first and the
    slope between the last two."""
    first_layers, first_s = runs[0]
    if len(runs) == 1:
        return first_s
    (few, few_s), (many, many_s) = runs[-2:]
    return first_s + (num_layers - first_layers) * (many_s - few_s) / (many - few)


def table(rows: list[dict[str, Any]]) -> str:
    header = ["tool", "method", "layers", "s", "of it digests", "s a layer", "peak GB", "artifact GB"]
    lines = [
        [
            row["tool"],
            row["method"],
            str(row["num_layers"]),
            f"{row['seconds']:.1f}"
            + (f" (from {row['measured'][-1]['layers']} layers)" if len(row.get("measured", ())) > 1 else ""),
            f"{row['seconds'] - row['stage_s']:.1f}" if "stage_s" in row else "",
            f"{row['seconds'] / row['num_layers']:.2f}",
            "" if row["peak_device_bytes"] is None else f"{row['peak_device_bytes'] / 1e9:.1f}",
            f"{row['artifact_bytes'] / 1e9:.2f}" if "artifact_bytes" in row else "",
        ]
        for row in rows
    ]
    return markdown(header, lines)


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=[*METHODS, COPY])
    parser.add_argument("--layers", type=int, default=None, help="of the model; all by default")
    parser.add_argument("--num-samples", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument(
        "--scratch", type=Path, default=None, help="a directory on the disk that is to be measured"
    )
    parser.add_argument(
        "--tools", nargs="+", default=[], choices=TOOLS, help="other tools, on the same device"
    )
    parser.add_argument(
        "--peers",
        type=Path,
        default=None,
        help="virtual environment of the other tools; the one this runs in by default",
    )
    parser.add_argument(
        "--peer-layers",
        type=int,
        default=None,
        help="layers that other tools quantize, more than one; all by default",
    )
    args = parse_arguments(parser, lambda document: table(document["rows"]))
    if args.peer_layers is not None and args.peer_layers < 2:
        parser.error("--peer-layers takes two or more: what a layer takes is the difference to one.")
    return args


def measurements(
    args: argparse.Namespace, directory: Path, arch: Arch, device: torch.device
) -> Iterator[dict[str, Any]]:
    build(directory, arch, device, args.num_samples, args.seq_len)
    for method in args.methods:
        if method == COPY:
            yield {"tool": "cp", "method": method, **copy(directory)}
        else:
            yield {"tool": "compress", "method": method, **quantize(directory, METHODS[method], device)}
    python = Path(sys.executable) if args.peers is None else args.peers / "bin" / "python"
    for tool in args.tools:
        yield quantize_elsewhere(directory, tool, python, device, arch, args.peer_layers)


def main() -> None:
    args = arguments()
    device = pick_device()
    name, arch = read_arch(args.model)
    num_layers = arch.num_layers
    arch = cut(arch, args.layers)
    rows = list[dict[str, Any]]()
    facts = {
        "shape": name,
        "num_layers": arch.num_layers,
        "num_samples": args.num_samples,
        "seq_len": args.seq_len,
    }
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        for measured in measurements(args, Path(scratch), arch, device):
            per_layer_s = measured["seconds"] / arch.num_layers
            of_all = {"seconds_per_layer": per_layer_s, "full_model_seconds": per_layer_s * num_layers}
            rows.append(
                {
                    "tool": measured.pop("tool"),
                    "method": measured.pop("method"),
                    **facts,
                    **of_all,
                    **measured,
                }
            )
            print(f"{rows[-1]['tool']} {rows[-1]['method']}: {rows[-1]['seconds']:.1f} s", flush=True)
            if args.out is not None:
                write_results(
                    args.out,
                    rows,
                    device=device,
                    commit=args.commit,
                    facts={"dtype": str(model_dtype(device)).removeprefix("torch.")},
                )
    print(table(rows))


if __name__ == "__main__":
    main()
