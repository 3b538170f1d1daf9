"""The hardware's floor under prefill and decode, from rates measured on this device, and the advice that follows from it.

    memory_ms   bytes that must move / read bandwidth          decode:  weights + keys and values of every sequence
    compute_ms  arithmetic / matrix-product rate               prefill: 2 x weights x tokens + attention over S (S + 1) / 2 pairs a sequence
    floor       the larger of the two; the larger one names the bound

Both rates are measured, never taken from a data sheet: a plain read of a buffer much larger than the cache, and a large square matrix
product. Activations and norms are left out: small, and a floor must not lie above the truth.
"""

import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

READ_BYTES = {
    "cuda": 4 << 30,
    "cpu": 1 << 30,
}  # an H200 has 50 MB of L2, server CPUs up to several hundred MB of L3
_READ_COLUMNS = 1024  # of the plain reads torch offers (sum, amax, dot, mv) the fastest on an H200: 4.45 TB/s over 4 GiB, 4.02 over 1 GiB


@dataclass(frozen=True)
class Work:
    """What one model asks of the device, whatever the batch. A multiply and an add are two FLOPs."""

    weight_bytes: int  # read once by every step
    kv_bytes_per_token: int
    flops_per_token: int  # 2 x weights of the linears that every token passes
    head_flops: int  # 2 x weights of the head: once a sequence and step, in prefill too
    attention_flops_per_pair: int  # one query against one key, all layers: 4 x heads x head_dim x layers


@dataclass(frozen=True)
class RooflineRow:
    """One phase of serving at one batch size."""

    phase: Literal["prefill", "decode"]
    batch_size: int
    prompt_tokens: int
    output_tokens: int
    bytes: int
    flops: int
    memory_ms: float
    compute_ms: float
    bound: Literal["memory", "compute"]
    floor_ms: float
    measured_ms: float
    floor_frac: float
    time_frac: float  # of a whole request
    advice: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_bandwidth(device: torch.device, *, size_bytes: int | None = None, repeats: int = 9) -> float:
    """Bytes per second of a plain read: a matrix-vector product in fp32 over `size_bytes`, median of `repeats`.

    The default size is far above every cache and, on CUDA, at most a quarter of the free memory.
    """
    if size_bytes is None:
        size_bytes = READ_BYTES.get(device.type, READ_BYTES["cpu"])
        if device.type == "cuda":
            size_bytes = min(size_bytes, torch.cuda.mem_get_info(device)[0] // 4)
    matrix = torch.ones(size_bytes // 4 // _READ_COLUMNS, _READ_COLUMNS, dtype=torch.float32, device=device)
    vector = torch.ones(_READ_COLUMNS, dtype=torch.float32, device=device)
    return matrix.numel() * 4 / _median_seconds(lambda: torch.mv(matrix, vector), device, repeats=repeats)


def measure_matmul_rate(
    device: torch.device, dtype: torch.dtype, *, size: int | None = None, repeats: int = 9
) -> float:
    """FLOPs per second of a square matrix product of `size` (default: 8192 on CUDA, 1024 elsewhere), median of `repeats`."""
    side = size or (8192 if device.type == "cuda" else 1024)
    # Random values: a product of constants draws less power and runs at a higher clock than real ones do.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(side, side, generator=generator, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / _median_seconds(lambda: left @ right, device, repeats=repeats)


def roofline(
    work: Work,
    *,
    batch_size: int,
    prompt_tokens: int,
    output_tokens: int,
    ttft_ms: float,
    tpot_ms: float,
    bandwidth_bytes_per_s: float,
    flops_per_s: float,
) -> list[RooflineRow]:
    """Prefill and decode of one measured batch against the floor; `ttft_ms` and `tpot_ms` are its medians."""
    decode_total_ms = (output_tokens - 1) * tpot_ms
    pairs = prompt_tokens * (prompt_tokens + 1) // 2
    context = prompt_tokens + output_tokens / 2
    kv_bytes = int(batch_size * context * work.kv_bytes_per_token)
    phases = (
        (
            "prefill",
            work.weight_bytes + batch_size * prompt_tokens * work.kv_bytes_per_token,
            batch_size
            * (
                prompt_tokens * work.flops_per_token + work.head_flops + pairs * work.attention_flops_per_pair
            ),
            ttft_ms,
            ttft_ms / (ttft_ms + decode_total_ms),
        ),
        (
            "decode",
            work.weight_bytes + kv_bytes,
            int(
                batch_size
                * (work.flops_per_token + work.head_flops + context * work.attention_flops_per_pair)
            ),
            tpot_ms,
            decode_total_ms / (ttft_ms + decode_total_ms),
        ),
    )
    rows: list[RooflineRow] = []
    for phase, num_bytes, flops, measured_ms, time_frac in phases:
        memory_ms = num_bytes / bandwidth_bytes_per_s * 1e3
        compute_ms = flops / flops_per_s * 1e3
        floor_ms = max(memory_ms, compute_ms)
        rows.append(
            RooflineRow(
                phase="prefill" if phase == "prefill" else "decode",
                batch_size=batch_size,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                bytes=num_bytes,
                flops=flops,
                memory_ms=memory_ms,
                compute_ms=compute_ms,
                bound="memory" if memory_ms >= compute_ms else "compute",
                floor_ms=floor_ms,
                measured_ms=measured_ms,
                floor_frac=floor_ms / measured_ms,
                time_frac=time_frac,
                advice=advise(
                    phase,
                    memory_ms=memory_ms,
                    compute_ms=compute_ms,
                    measured_ms=measured_ms,
                    kv_frac=kv_bytes / (work.weight_bytes + kv_bytes),
                ),
            )
        )
    return rows


def advise(phase: str, *, memory_ms: float, compute_ms: float, measured_ms: float, kv_frac: float) -> str:
    """One sentence that follows from the numbers; the order of the cases is the order in which effort pays."""
    share = max(memory_ms, compute_ms) / measured_ms
    ratio = max(memory_ms, compute_ms) / max(min(memory_ms, compute_ms), 1e-12)
    times = f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.1f}x"
    if share > 1.05:
        return (
            "Faster than the floor: the weights stay in a cache, or the rates were measured while the device was busy. Do not read a bound "
            "from this row."
        )
    if share < 0.4:
        explained = f"{share * 100:.0f}" if share >= 0.01 else "under 1"
        return (
            f"Only {explained} % of this time is explained by bytes or arithmetic: look at launches, the host and slow kernels first; "
            "making the model smaller will buy less than the floor promises."
        )
    if phase == "decode" and memory_ms >= compute_ms:
        if kv_frac > 0.5:
            return (
                f"Memory-bound, and {kv_frac * 100:.0f} % of the bytes are keys and values: quantize the KV cache or shorten the context "
                "before the weights."
            )
        return (
            f"Memory-bound ({times} more bytes than arithmetic), {(1 - kv_frac) * 100:.0f} % of the bytes are weights: fewer bits per "
            "weight, speculative decoding or a larger batch pay directly."
        )
    if phase == "decode":
        return (
            f"Compute-bound ({times}): weight-only quantization no longer helps at this batch size; compute in FP8 or INT8, or use "
            "smaller batches."
        )
    if compute_ms > memory_ms:
        return (
            f"Compute-bound ({times}): weight-only quantization does not shorten it; FP8 or INT8 activations, pruning or a prefix cache "
            "for shared prompts do."
        )
    return f"Memory-bound ({times}): prompts are too short to fill the arithmetic units; prefill several requests together."


def device_key(device: torch.device) -> str:
    """The name of a device in gates and result files: `cpu` or `cuda-sm<compute capability>`."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda-sm{major}{minor}"


def environment_facts(device: torch.device) -> dict[str, Any]:
    """What a measured number depends on besides the code, for the result files."""
    facts: dict[str, Any] = {
        "device_key": device_key(device),
        "device": _cpu_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "os": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "sm": device_key(device).removeprefix("cuda-"),
            "num_sms": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
        facts |= _nvidia_smi(f"GPU-{properties.uuid}")
    return facts


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _nvidia_smi(uuid: str) -> dict[str, Any]:
    """Driver and clocks, which torch does not know. A container without the tool simply has no such facts."""
    fields = {
        "driver": "driver_version",
        "clock_sm_mhz": "clocks.sm",
        "clock_sm_max_mhz": "clocks.max.sm",
        "clock_memory_mhz": "clocks.mem",
    }
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(fields.values())}",
        "--format=csv,noheader,nounits",
        f"--id={uuid}",
    ]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in answer.split(",")]
    return {
        name: int(value) if value.isdigit() else value for name, value in zip(fields, values, strict=True)
    }


def _median_seconds(run: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    for _ in range(2):
        run()
    seconds: list[float] = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record(torch.cuda.current_stream(device))
            run()
            end.record(torch.cuda.current_stream(device))
            torch.cuda.synchronize(device)
            seconds.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)
