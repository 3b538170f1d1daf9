r"""How fast a student learns from a teacher on this device: tokens a second, and the share of the device's
arithmetic that is the models'.

    python -m scripts.bench_distill --student llama-3.2-1b --teacher llama-3.1-8b \
        --out benchmarks/h200/distill.json

Random weights of the named shapes and random tokens: time depends on shapes, not values. A step is what the
distil stage does: the teacher's forward, the student's forward, the divergence of the two through their heads
slice by slice, backward, clipping, fused AdamW on float32 master weights; compute in bfloat16.

Operations of a token, which MFU counts (nothing that is computed twice or for bookkeeping):

    student   6 x (weights of its linears and head)  +  3 x attention          forward and backward
    teacher   2 x (weights of its linears and head)  +      attention          forward
    attention = 2 x 2 x H x C x S / 2 a layer        causal: each query meets half of the S positions,
                                                     in two products

MFU = operations a token x tokens a second / peak; the peak is that of dense bfloat16 (989.5 TFLOP/s for an
H200; --peak-tflops elsewhere).
"""

import argparse
import gc
import itertools
import time
from typing import Any

import torch

from compress.distill.losses import Divergence
from compress.distill.objective import Objective, Teacher, checkpoint_layers_
from compress.distill.train import TrainConfig, Training
from compress.models.arch import Arch
from compress.models.random_source import RandomSource
from compress.models.weights import build_decoder
from scripts.bench_setup import argument_parser, markdown, pick_device, read_arch, write_results

PEAK_TFLOPS = {"H200": 989.5, "H100": 989.5, "A100": 312.0}


def forward_flops(arch: Arch, seq_len: int) -> float:
    """Of one token, averaged over a window."""
    attention = sum(
        2.0 * layer.num_heads * layer.head_dim * min(seq_len, layer.window or seq_len)
        for layer in arch.layers
    )
    return 2.0 * (arch.num_active_linear_params + arch.vocab_size * arch.hidden_size) + attention


def flops_of(student: Arch, teacher: Arch, seq_len: int) -> float:
    return 3.0 * forward_flops(student, seq_len) + forward_flops(teacher, seq_len)


def measure(
    args: argparse.Namespace, student_arch: Arch, teacher_arch: Arch, device: torch.device
) -> dict[str, Any]:
    """Seconds of each step after the warm-up, and bytes of the device at most."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    student = build_decoder(
        RandomSource(student_arch, device=device, dtype=torch.float32), dtype=torch.float32, device=device
    )
    student.requires_grad_(True)
    teacher = Teacher(
        build_decoder(RandomSource(teacher_arch, device=device, dtype=dtype), dtype=dtype, device=device),
        device=device,
        compile=args.compile,
    )
    if args.checkpoint_layers:
        checkpoint_layers_(student)
    objective = Objective(
        Divergence(args.loss, args.temperature), teacher, compute_dtype=dtype, compile=args.compile
    )
    generator = torch.Generator(device).manual_seed(0)
    tokens_BS = torch.randint(
        student_arch.vocab_size, (args.batch_size, args.seq_len + 1), device=device, generator=generator
    )
    config = TrainConfig(
        args.warmups + args.steps,
        args.batch_size,
        args.micro_batch_size,
        1e-5,
        args.optimizer,
        compute_dtype=dtype,
        log_every=1,
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = list[float]()
    started_s = time.perf_counter()
    for _ in Training(
        student, objective, lambda step: tokens_BS, config, device=device
    ).rows():  # a row reads the loss, so it waits
        now = time.perf_counter()
        seconds.append(now - started_s)
        started_s = now
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    timed = sorted(seconds[args.warmups :])
    return {
        "step_s": timed[len(timed) // 2],
        "step_s_worst": timed[-1],
        "warmup_s": sum(seconds[: args.warmups]),
        "peak_device_bytes": peak,
    }


def peak_flops(device: torch.device, given: float | None) -> float | None:
    """None where nobody knows it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = given or next((tflops for key, tflops in PEAK_TFLOPS.items() if key in name), None)
    return None if known is None else known * 1e12


def table(rows: list[dict[str, Any]]) -> str:
    header = [
        "student <- teacher",
        "batch x seq",
        "micro",
        "compile",
        "checkpoint",
        "s a step",
        "tokens/s",
        "TFLOP/s",
        "MFU",
        "peak GB",
    ]
    lines = [
        [
            f"{row['student']} <- {row['teacher']}",
            f"{row['batch_size']} x {row['seq_len']}",
            str(row["micro_batch_size"]),
            str(row["compile"]).lower(),
            str(row["checkpoint_layers"]).lower(),
            f"{row['step_s']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['flops_per_s'] / 1e12:.1f}",
            "" if row["mfu"] is None else f"{row['mfu']:.1%}",
            "" if row["peak_device_bytes"] is None else f"{row['peak_device_bytes'] / 1e9:.1f}",
        ]
        for row in rows
    ]
    return markdown(header, lines)


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument(
        "--student", default="llama-3.2-1b", help="a model that ships with the package, or a config.json"
    )
    parser.add_argument("--teacher", default="llama-3.1-8b")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences a step")
    parser.add_argument("--micro-batch-sizes", type=int, nargs="+", default=[8], help="each is measured")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5, help="that are timed; the median counts")
    parser.add_argument("--warmups", type=int, default=3)
    parser.add_argument("--loss", default="forward_kl", choices=["forward_kl", "reverse_kl", "js"])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "muon"])
    parser.add_argument(
        "--compile",
        nargs="+",
        default=["on"],
        choices=["on", "off"],
        dest="compiles",
        help="each is measured",
    )
    parser.add_argument("--checkpoint-layers", action="store_true")
    parser.add_argument(
        "--peak-tflops",
        type=float,
        default=None,
        help="of dense bfloat16, where the device is not known here",
    )
    args = parser.parse_args()
    device = pick_device()
    (student, student_arch) = read_arch(args.student)
    (teacher, teacher_arch) = read_arch(args.teacher)
    peak = peak_flops(device, args.peak_tflops)
    rows = list[dict[str, Any]]()
    for compile_text, micro in itertools.product(args.compiles, args.micro_batch_sizes):
        args.compile = compile_text == "on"
        args.micro_batch_size = micro
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        measured = measure(args, student_arch, teacher_arch, device)
        tokens_per_s = args.batch_size * args.seq_len / measured["step_s"]
        rate = flops_of(student_arch, teacher_arch, args.seq_len) * tokens_per_s
        keys = (
            "batch_size",
            "micro_batch_size",
            "seq_len",
            "loss",
            "temperature",
            "optimizer",
            "compile",
            "checkpoint_layers",
        )
        facts = {"student": student, "teacher": teacher, **{key: getattr(args, key) for key in keys}}
        speed = {
            "tokens_per_s": tokens_per_s,
            "flops_per_s": rate,
            "mfu": None if peak is None else rate / peak,
        }
        rows.append({"tool": "compress", "experiment": "distill_step", **facts, **speed, **measured})
        print(table(rows[-1:]), flush=True)
        if args.out is not None:
            write_results(args.out, rows, device=device, commit=args.commit, facts={"peak_flops_per_s": peak})
    print(table(rows))


if __name__ == "__main__":
    main()
