"""How much memory quantizing takes when the model is larger than that: weights of random numbers on disk, the
quantize stage in a process of its own, its peak resident size beside the bound and beside what `compress
plan` says.

    python -m scripts.bench_memory --out benchmarks/memory.json

The bound is B = memory after import + 6 x one layer in bf16 + the activations of the calibration set. The
model's layers hold at least four times what B grants to layers, so a stage that kept them could not stay
below. Needs less than 3 GB of disk, and no download.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LAYERS_IN_B = 6
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "num_hidden_layers": 24,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 0,
    "eos_token_id": 0,
    "dtype": "bfloat16",
}


def shape_of(args: argparse.Namespace) -> dict[str, Any]:
    heads = args.hidden_size // CONFIG["head_dim"]
    widths = {
        "hidden_size": args.hidden_size,
        "intermediate_size": args.intermediate_size,
        "num_hidden_layers": args.layers,
    }
    return {**CONFIG, **widths, "num_attention_heads": heads, "num_key_value_heads": args.kv_heads or heads}


def build(directory: Path, config: dict[str, Any], num_samples: int, seq_len: int) -> None:
    """The model in shards of 256 MB, and token ids."""
    import torch

    from compress.data.model_tokens import TOKENS_NAME
    from compress.data.tokens import TokenSet, save_token_set
    from compress.models.checkpoint_writer import write_checkpoint
    from compress.models.family import family_of
    from compress.models.random_source import RandomSource

    arch = family_of(config).read_config(config)
    source = RandomSource(arch, device=torch.device("cpu"), dtype=torch.bfloat16)
    (directory / "model").mkdir()
    write_checkpoint(directory / "model", source, max_shard_bytes=256_000_000)
    tokens = torch.randint(
        arch.vocab_size, (num_samples, seq_len), generator=torch.Generator().manual_seed(0), dtype=torch.int32
    )
    (directory / "tokens").mkdir()
    save_token_set(TokenSet(tokens, 0, 0, {}), directory / "tokens" / TOKENS_NAME)


def quantize(directory: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Run the stage here; the sizes of this process before, and at its peak."""
    from compress.artifact.writer import ArtifactWriter
    from compress.context import Context
    from compress.registry.model_source import ModelSource
    from compress.stages import STAGES, Input, Inputs, Port

    stage = STAGES.get("quantize")
    for name in ("scratch", "out"):
        (directory / name).mkdir()
    source = ModelSource(directory / "model", "random", None, "")
    inputs = Inputs(
        source, {Port.DENSE: Input(directory / "model", ""), Port.CALIB: Input(directory / "tokens", "")}
    )
    after_import = resident("VmRSS")
    started_s = time.perf_counter()
    stage.run(
        stage.spec.model_validate(spec),
        inputs,
        ArtifactWriter(directory / "out"),
        Context("cpu", 0, directory / "scratch"),
    )
    return {
        "after_import_bytes": after_import,
        "peak_bytes": resident("VmHWM"),
        "seconds": time.perf_counter() - started_s,
    }


def resident(line: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    for each in Path("/proc/self/status").read_text().splitlines():
        if each.startswith(f"{line}:"):
            return int(each.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {line}")


def planned(config: dict[str, Any], spec: dict[str, Any], num_samples: int, seq_len: int) -> Any:
    """What `compress plan` says about the stage."""
    from compress.models.family import family_of
    from compress.stages import STAGES, PlanFacts
    from compress.stages.calibrate import Calibrate

    stage = STAGES.get("quantize")
    calib = Calibrate(num_samples=num_samples, seq_len=seq_len)
    facts = PlanFacts(family_of(config).read_config(config), "cpu", {"calibrate": calib})
    return stage.estimate(stage.spec.model_validate(spec), facts)


def measure(args: argparse.Namespace, name: str, spec: dict[str, Any], directory: Path) -> dict[str, Any]:
    from compress.models.family import family_of

    config = shape_of(args)
    arch = family_of(config).read_config(config)
    command = [sys.executable, __file__, "--child", json.dumps([str(directory), spec])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    measured = json.loads(done.stdout)
    layer = 2 * arch.num_linear_params // arch.num_layers
    activations = 4 * args.num_samples * args.seq_len * arch.hidden_size
    bound = measured["after_import_bytes"] + LAYERS_IN_B * layer + activations
    plan = planned(config, spec, args.num_samples, args.seq_len)
    return {
        "method": name,
        **measured,
        "layer_bytes": layer,
        "num_layers": arch.num_layers,
        "activation_bytes": activations,
        "bound_bytes": bound,
        "weights_to_layer_share": arch.num_layers / LAYERS_IN_B,
        "within": measured["peak_bytes"] <= bound,
        "planned_bytes": plan.peak_bytes,
        "planned_ratio": plan.peak_bytes / (measured["peak_bytes"] - measured["after_import_bytes"]),
        "disk_planned_bytes": plan.disk_bytes,
        "disk_bytes": sum(each.stat().st_size for each in (directory / "out").iterdir()),
    }


METHODS: dict[str, dict[str, Any]] = {
    "rtn": {"round": {"kind": "rtn"}},
    "gptq": {"round": {"kind": "gptq", "scale": "min_max"}},
    "gptq+search": {"round": {"kind": "gptq"}},
    "balanced": {"preset": "balanced"},
}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| method | after import | B | peak | share of B | planned / measured | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sizes = " | ".join(
            f"{row[key] / 1e6:.0f} MB" for key in ("after_import_bytes", "bound_bytes", "peak_bytes")
        )
        share = row["peak_bytes"] / row["bound_bytes"]
        lines.append(
            f"| {row['method']} | {sizes} | {share:.2f} | {row['planned_ratio']:.2f} | {row['seconds']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--intermediate-size", type=int, default=2048)
    parser.add_argument("--kv-heads", type=int, default=None)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--num-samples", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--methods", nargs="+", default=["gptq"], choices=list(METHODS))
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        directory, spec = json.loads(args.child)
        print(json.dumps(quantize(Path(directory), spec)))
        return
    rows = []
    for name in args.methods:
        with tempfile.TemporaryDirectory() as scratch:
            build(Path(scratch), shape_of(args), args.num_samples, args.seq_len)
            rows.append(measure(args, name, METHODS[name], Path(scratch)))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(table(rows))
    if args.out is not None:
        commit = subprocess.run(
            ["git", "rev-parse", "--verify", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        document = {
            "schema": 1,
            "device": "cpu",
            "versions": {"python": platform.python_version(), "torch": __import__("torch").__version__},
            "commit": commit,
            "date": time.strftime("%Y-%m-%d"),
            "command": " ".join(["python", *sys.argv]),
            "rows": rows,
        }
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
