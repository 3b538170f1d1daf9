"""Facts of the machine that numbers are measured on: the device's name, versions and clocks, and two rates
measured on it.

The rates are measured, never taken from a data sheet: a plain read of a buffer much larger than any cache,
and a large square matrix product.
"""

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.digest import digest_json

if TYPE_CHECKING:
    import torch

READ_BYTES = {"cuda": 4 << 30, "cpu": 1 << 30}
"""Bytes that `measure_bandwidth` reads: an H200 has 50 MB of L2, server CPUs up to several hundred MB of L3.
"""
_ARITHMETIC_FLAGS = ("avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile")
_ARITHMETIC_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
)
READ_COLUMNS = 1024
"""Columns of the matrix that is read by a matrix-vector product. Of the plain reads that torch offers (sum,
amax, dot, mv) `mv` is the fastest on an H200: 4.45 TB/s over 4 GiB, 4.02 over 1 GiB."""


def device_key(device: "torch.device") -> str:
    """Return the name of a device in gates and result files: `cpu` or `cuda-sm<compute capability>`."""
    import torch

    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda-sm{major}{minor}"


def arithmetic_class(device: str) -> str:
    """Return the kind of machine on which one program gives the same bits, for "cpu", "cuda" or "cuda:1": a
    word of letters, digits, `-` and `_`.

    Libraries choose their kernels by the CPU's vendor and instructions, and kernels differ in the order in
    which they add. Variables that choose for them (`ATEN_CPU_CAPABILITY` and the like) count too.
    """
    import torch

    if torch.device(device).type == "cuda":
        return device_key(torch.device(device))
    facts = _cpuinfo()
    found = set(facts.get("flags", facts.get("Features", "")).split())
    vendor = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}.get(facts.get("vendor_id", ""), "other")
    words = [platform.machine(), vendor, torch.backends.cpu.get_cpu_capability().lower()]
    words += [flag.removeprefix("avx512_") for flag in _ARITHMETIC_FLAGS if flag in found]
    chosen = {name: os.environ[name] for name in _ARITHMETIC_VARIABLES if name in os.environ}
    if chosen:
        words.append(digest_json(chosen).removeprefix("sha256:")[:8])
    return "-".join(word.replace("-", "_").replace(".", "_") for word in words)


def environment_facts(device: "torch.device") -> dict[str, Any]:
    """Return what a measured number depends on besides the code: names of device and system, versions,
    threads and clocks."""
    import torch

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
        facts |= _driver_facts(f"GPU-{properties.uuid}")
    return facts


def measure_bandwidth(device: "torch.device", *, size_bytes: int | None = None, repeats: int = 9) -> float:
    """Return bytes per second of a plain read: the median of `repeats` matrix-vector products in float32 over
    `size_bytes`.

    The default size is far above every cache and, on CUDA, at most a quarter of the free memory.
    """
    import torch

    if size_bytes is None:
        size_bytes = READ_BYTES.get(device.type, READ_BYTES["cpu"])
        if device.type == "cuda":
            size_bytes = min(size_bytes, torch.cuda.mem_get_info(device)[0] // 4)
    matrix = torch.ones(size_bytes // 4 // READ_COLUMNS, READ_COLUMNS, dtype=torch.float32, device=device)
    vector = torch.ones(READ_COLUMNS, dtype=torch.float32, device=device)
    return matrix.numel() * 4 / _median_seconds(lambda: torch.mv(matrix, vector), device, repeats=repeats)


def measure_matmul_rate(
    device: "torch.device", dtype: "torch.dtype", *, size: int | None = None, repeats: int = 9
) -> float:
    """Return FLOPs per second of a square matrix product of `size` (default: 8192 on CUDA, 1024 elsewhere),
    median of `repeats`."""
    import torch

    side = size or (8192 if device.type == "cuda" else 1024)
    # Random values: a product of constants draws less power and runs at a higher clock than real ones do.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(side, side, generator=generator, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / _median_seconds(lambda: left @ right, device, repeats=repeats)


def _cpu_name() -> str:
    return _cpuinfo().get("model name", platform.machine())


def _cpuinfo() -> dict[str, str]:
    """Return the entries of the first processor in `/proc/cpuinfo`."""
    cpuinfo = Path("/proc/cpuinfo")
    first = cpuinfo.read_text(encoding="utf-8").partition("\n\n")[0] if cpuinfo.exists() else ""
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _driver_facts(uuid: str) -> dict[str, Any]:
    """Return driver version and clocks of a GPU, which torch does not report; nothing in a container without
    `nvidia-smi`."""
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


def _median_seconds(run: Callable[[], object], device: "torch.device", *, repeats: int) -> float:
    import torch

    for _ in range(2):
        run()
    seconds: list[float] = []
    for _ in range(repeats):
        if device.type == "cuda":
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
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
