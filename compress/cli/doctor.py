"""`compress doctor`: whether this machine can do the work, what to do where not, and which kernel would serve
what here.

Imports only torch and the kernels (with triton, where it is), and what reads a model that is named; the rest
is metadata.
"""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.artifact.disk import file_in_the_way
from compress.cli.finding import Finding
from compress.cli.output import JsonFlag, emit, size_text, table
from compress.cli.packages import replaced_packages, requirements, triton, vision_and_audio
from compress.errors import EnvironmentUnfit
from compress.plugins import installed_version

if TYPE_CHECKING:
    from compress.models.arch import Arch

_CPU_FEATURES = {  # flag of /proc/cpuinfo: what the CPU path gains by it
    "avx2": "256-bit vectors",
    "avx512f": "512-bit vectors",
    "avx512_vnni": "fast INT8 products",
    "avx512_bf16": "fast bf16 products",
    "amx_bf16": "bf16 matrix tiles",
    "amx_int8": "INT8 matrix tiles",
}
_SHAPES_OF = "llama-3.1-8b"
_LOW_DISK_BYTES = 20 << 30  # an 8B checkpoint in bf16 is 16 GB


def doctor(
    workspace: Annotated[Path, typer.Option(help="Where results are kept; its disk is looked at.")] = Path(
        ".compress"
    ),
    model: Annotated[
        str,
        typer.Option(help="Whose shapes the kernels are listed for: hf://org/name, or a model's directory."),
    ] = _SHAPES_OF,
    as_json: JsonFlag = False,
) -> None:
    """Check Python, packages, CPU, GPU, disk and kernels; exit code 4 when something required is missing."""
    findings = [*examine(workspace)]
    unfit = [finding for finding in findings if finding.status == "unfit"]
    rows = [(finding.status, finding.name, finding.value) for finding in findings]
    advice = [f"{finding.name}: {finding.advice}" for finding in findings if finding.advice]
    verdict = f"not fit: {', '.join(finding.name for finding in unfit)}" if unfit else "fit for work"
    served = kernels_here(model) if all(finding.name != "torch" for finding in unfit) else None
    text = "\n".join([table(rows), "", *advice, "", *([kernel_text(served), ""] if served else []), verdict])
    document = {"fit": not unfit, "findings": [asdict(finding) for finding in findings], "kernels": served}
    failure = None
    if unfit:
        missing = ", ".join(finding.name for finding in unfit)
        hint = " ".join(finding.advice for finding in unfit if finding.advice)
        failure = EnvironmentUnfit(f"this machine is not fit: {missing}.", hint=hint or None)
        document = {**document, "status": "unfit"}
    emit(document, text, as_json=as_json, failure=failure)
    if failure is not None:
        raise typer.Exit(failure.exit_code)


def examine(workspace: Path) -> Iterator[Finding]:
    """Everything that is looked at, in the order of the report."""
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from requirements(installed_version)
    yield from accelerator()
    yield triton(installed_version)
    yield cpu(_read_text(Path("/proc/cpuinfo")))
    yield arithmetic()
    yield from vision_and_audio(installed_version)
    yield from replaced_packages(installed_version)
    yield disk(workspace)


def accelerator() -> Iterator[Finding]:
    """torch, and the GPUs it can use. No GPU is fine: all but speed works on the CPU."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of a broken installation
        yield Finding("torch", "unfit", f"cannot be imported: {error}", "pip install 'torch>=2.9'")
        return
    yield Finding(
        "torch",
        "ok",
        f"{torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU build'}",
    )
    driver = driver_version()
    if driver:
        yield Finding("driver", "ok", driver)
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            capability = device.major * 10 + device.minor
            old = (
                "The kernels here are made for sm80 (Ampere) and newer; the torch path is used."
                if capability < 80
                else ""
            )
            yield Finding(
                f"gpu {index}",
                "note" if old else "ok",
                f"{device.name}, sm{capability}, {size_text(device.total_memory)}",
                old,
            )
    elif driver:
        build = "the driver is too old for this torch" if torch.version.cuda else "this torch is a CPU build"
        yield Finding(
            "gpu",
            "note",
            "present, not usable by torch",
            f"{build}; install a torch build that matches driver {driver}.",
        )
    else:
        yield Finding(
            "gpu",
            "note",
            "none",
            "Compression, validation and export work on the CPU; latency numbers need a GPU.",
        )


def kernels_here(model: str = _SHAPES_OF) -> dict[str, Any]:
    """Return which kernel serves which op, scheme and range of rows here, for the shapes of one model, and
    why the others do not.

    Raises:
        StorageError: the model is not found.
        UnsupportedArch: its architecture is not known.
    """
    import torch

    from compress.kernels.coverage import coverage, unused
    from compress.kernels.problem import KernelDevice

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = KernelDevice.from_torch(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    served = coverage(_arch(model), machine)
    return {
        "model": model,
        "device": machine.device,
        "sm": machine.sm,
        "dtype": machine.dense,
        "rows": [each.as_json() for each in served],
        "unused": unused(served),
    }


def _arch(model: str) -> "Arch":
    """Return the shapes of a model that ships with the package by its plain name, or of any other."""
    from compress.cli.plan import model_reader
    from compress.models.family import family_of
    from compress.models.known import known_config

    shipped = known_config(model)
    if shipped is not None and "/" not in model:
        return family_of(shipped).read_config(shipped)
    read, _ = model_reader(model, offline=False)
    return read()


def kernel_text(served: Mapping[str, Any]) -> str:
    """Return the kernels as a table: rows served by one kernel share a line, linears of a scheme first, then
    schemes.
    """
    linears: dict[tuple[str, ...], list[str]] = {}
    sizes: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for row in served["rows"]:
        sizes.setdefault((row["op"], row["linear"]), set()).add((row["n"], row["k"]))
    for row in served["rows"]:
        has_several = len(sizes[row["op"], row["linear"]]) > 1
        key = (
            row["op"],
            f"{row['phase']} {'–'.join(map(str, row['m_range']))}",
            row["kernel"] or "none",
            row["scheme"],
        )
        linears.setdefault(key, []).append(_named(row, has_several=has_several))
    schemes: dict[tuple[str, ...], list[str]] = {}
    for (op, m_range, kernel, scheme), names in linears.items():
        what = "" if names == [op] else " ".join(names)
        schemes.setdefault((op, what, m_range, kernel), []).append(scheme)
    lines = [("op", "rows", "kernel", "scheme or KV format", "linears")]
    lines += [
        (op, m_range, kernel, " ".join(each), what) for (op, what, m_range, kernel), each in schemes.items()
    ]
    head = f"kernels on {served['device']}, computing in {served['dtype']} (shapes of {served['model']}):"
    idle: dict[str, dict[str, list[str]]] = {}
    for row in served["unused"]:
        idle.setdefault(row["reason"], {}).setdefault(row["op"], []).append(row["kernel"])
    reasons = [f"not used here: {reason}" for reason in idle]
    names = [
        "".join(f"\n    {op}: {', '.join(kernels)}" for op, kernels in by_op.items())
        for by_op in idle.values()
    ]
    return "\n".join([head, table(lines), *map("".join, zip(reasons, names, strict=True))])


def _named(row: Mapping[str, Any], *, has_several: bool) -> str:
    """Return the name of the linear of a row, or `with sinks`, `with relative logits` or `with ALiBi` for
    such attention. Where the model has several of that name, their sizes follow, and are the name of other
    ops."""
    size = f"{row['n']}x{row['k']}" if has_several else ""
    if row.get("sinks"):
        return f"with sinks {size}".rstrip()
    if row.get("relative"):
        return f"with relative logits {size}".rstrip()
    if row.get("alibi"):
        return f"with ALiBi {size}".rstrip()
    if row["op"] != "linear":
        return size or str(row["linear"])
    return " ".join(filter(None, (row["linear"], size, "(gated)" if row["activation"] else "")))


def driver_version() -> str | None:
    """Return the driver version by nvidia-smi, None where there is no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split("\n")[0].strip() or None if done.returncode == 0 else None


def cpu(cpuinfo: str) -> Finding:
    """Return the finding about the instruction sets that decide the speed of the CPU path."""
    match = re.search(r"^flags\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    present = [f"{flag} ({gain})" for flag, gain in _CPU_FEATURES.items() if flag in flags]
    cores = len(os.sched_getaffinity(0))
    slow_bf16 = not flags & {"avx512_bf16", "amx_bf16"}
    advice = (
        "No bf16 instructions: bf16 models run several times slower here than on a CPU with AMX or AVX-512 "
        "BF16."
        if slow_bf16
        else ""
    )
    return Finding(
        "cpu",
        "note" if slow_bf16 else "ok",
        f"{cores} cores, {', '.join(present) or 'no vector features seen'}",
        advice,
    )


def arithmetic() -> Finding:
    """Return the finding about the kind of machine on which a recipe gives the same digests as here."""
    try:
        from compress.machine import arithmetic_class
        from compress.pipeline import pick_device

        kind = arithmetic_class(pick_device(None))
    except ImportError:  # torch is missing, which has a finding of its own
        kind = "unknown without torch"
    return Finding("arithmetic", "ok", f"{kind}: digests are the same on machines of this kind")


def disk(workspace: Path) -> Finding:
    """Room where the workspace is, or will be."""
    place = workspace.absolute()
    if (file := file_in_the_way(place)) is not None:
        return Finding(
            "disk", "unfit", f"{file} is a file, and no directory", "Give a workspace in another place."
        )
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    low = free < _LOW_DISK_BYTES
    advice = (
        f"A run keeps every stage's result; an 8B model wants {size_text(_LOW_DISK_BYTES)} and more."
        if low
        else ""
    )
    if not os.access(place, os.W_OK):
        return Finding(
            "disk", "unfit", f"{place} is not writable", "Give a workspace that this user may write to."
        )
    return Finding("disk", "note" if low else "ok", f"{size_text(free)} free at {place}", advice)


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
