"""The table of schemes by device: the kernels that the runtime selects for a shape, without a device, and the
result files that time them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from compress.kernels.coverage import Served, coverage
from compress.kernels.problem import KernelDevice
from compress.kernels.select import KERNELS
from compress.models.arch import Arch
from compress.models.family import family_of
from compress.models.known import known_config
from compress.quant.kv import KV_CACHES, page_format, transforms_heads
from compress.quant.scheme import DENSE, SCHEMES
from scripts.docs.markdown import table
from scripts.docs.result_files import BENCHMARKS, ROOT, ResultFile, Row

MEASURED = "measured"
COMPILED = "compiled only"
REFERENCE = "reference"
DENSE_SHAPE = "meta-llama/Llama-3.1-8B"
MIXTURE_SHAPE = "Qwen/Qwen3-30B-A3B"
CAPABILITIES: Mapping[str, int] = {"NVIDIA H200": 90, "NVIDIA H100 80GB HBM3": 90}
"""Device of a result file -> compute capability times ten; a file whose device is its host's CPU has 0."""
DEVICES: Mapping[str, KernelDevice] = {
    "Hopper (sm_90)": KernelDevice("cuda", 90, torch.bfloat16),
    "Ampere (sm_80)": KernelDevice("cuda", 80, torch.bfloat16),
    "CPU": KernelDevice("cpu", 0, torch.float32),
}
BLOCK_INPUTS_SM = 100
"""The least compute capability, times ten, of a GPU that multiplies codes in blocks by their scales."""
LINEAR, EXPERTS, CACHE = "linear", "experts", "cache"
HADAMARD_OP = "hadamard"
OPS: Mapping[str, tuple[str, ...]] = {
    LINEAR: ("linear",),
    EXPERTS: ("experts",),
    CACHE: ("rope_store", "attention_decode", "attention_prefill"),
    HADAMARD_OP: ("hadamard",),
}
"""What a scheme, a cache format or a transform of heads applies to -> the ops whose kernels serve it."""
TIMES = ("ttft_ms_p50", "tpot_ms_p50", "step_ms_p50", "us")
"""Keys of a row that times this runtime, from whole requests down to one kernel."""


@dataclass(frozen=True)
class Timing:
    """A row of a result file that times this runtime."""

    path: str
    sm: int
    row: Row

    def concerns(self, subject: str, name: str) -> bool:
        """Return whether the row times linears, experts or caches of the format of that name."""
        op = self.row.get("op")
        if subject == CACHE:
            return str(self.row.get("kv", "")).upper() == name or (
                op in OPS[CACHE] and self.row["scheme"] == name
            )
        of_experts = op == "experts" or "experts_hit" in self.row
        return self.row["scheme"] == name and op in (None, subject) and of_experts == (subject == EXPERTS)

    @property
    def rank(self) -> tuple[int, str]:
        """The order of rows: whole requests before kernels, then by path."""
        return next(idx for idx, key in enumerate(TIMES) if key in self.row), self.path


@cache
def timings() -> tuple[Timing, ...]:
    """Return the rows under `benchmarks/` that time a scheme in this runtime.

    Raises:
        LookupError: a file was measured on a GPU whose compute capability is not known here.
    """
    found = []
    for path in sorted(BENCHMARKS.rglob("*.json")):
        file = ResultFile(path)
        rows = [row for run in file.runs for row in run.rows] if {"rows", "device"} <= file.stated else []
        timed = [
            row
            for row in rows
            if "scheme" in row and row.get("tool", "compress") == "compress" and set(TIMES) & set(row)
        ]
        if not timed:
            continue
        device = file.facts["device"]
        on_host = device == (file.facts.get("host") or {}).get("cpu")
        if not on_host and device not in CAPABILITIES:
            raise LookupError(f"{path.name} was measured on {device}, whose capability is not stated")
        name = path.relative_to(ROOT).as_posix()
        found += [Timing(name, 0 if on_host else CAPABILITIES[device], row) for row in timed]
    return tuple(sorted(found, key=lambda each: each.rank))


def arch_of(model: str) -> Arch:
    """Return the shape of a model whose config ships with the package."""
    config = known_config(model)
    assert config is not None, f"the config of {model} ships with the package"
    return family_of(config).read_config(config)


@cache
def served(device: str, subject: str) -> tuple[Served, ...]:
    """Return the kernels that a device selects for linears, experts or caches."""
    arch = arch_of(MIXTURE_SHAPE if subject == EXPERTS else DENSE_SHAPE)
    return tuple(row for row in coverage(arch, DEVICES[device]) if row.problem.op in OPS[subject])


def is_reference(row: Served) -> bool:
    """Return whether a kernel of priority 0, which dequantizes and multiplies, serves a problem."""
    return row.kernel is None or KERNELS[row.problem.op].get(row.kernel).priority == 0


def word(device: str, subject: str, name: str) -> str:
    """Return one word for a scheme or cache format on a device."""
    rows = rows_of(device, subject, name)
    if not rows or any(map(is_reference, rows)):
        return REFERENCE
    return COMPILED if timing_of(device, subject, name) is None else MEASURED


def rows_of(device: str, subject: str, name: str) -> list[Served]:
    """Return the kernels that a device selects for a scheme or cache format; pages of transformed heads are
    served as the same pages, after the transform's own kernel."""
    own = name_on(device, name)
    rows = [row for row in served(device, subject) if row.problem.scheme == page_format(own)]
    return rows + (list(served(device, HADAMARD_OP)) if transforms_heads(own) else [])


def name_on(device: str, name: str) -> str:
    """Return the name that kernels and result files have for a scheme or format: dense ones go by dtype."""
    return DEVICES[device].dense if name == DENSE else name


def timing_of(device: str, subject: str, name: str) -> Timing | None:
    """Return the row that times a scheme or cache format on a device, the first of the best kind."""
    sm, own = DEVICES[device].sm, name_on(device, name)
    return next((each for each in timings() if each.sm == sm and each.concerns(subject, own)), None)


def cell(device: str, subject: str, name: str) -> str:
    """Return the word of a cell, with a link to the file where it is measured."""
    found = word(device, subject, name)
    timing = timing_of(device, subject, name)
    return f"[{found}](../../{timing.path})" if found == MEASURED and timing is not None else found


def words(subject: str, names: Iterable[str], title: str) -> str:
    """Return the table of words by device; names with the same words share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        rows.setdefault(tuple(cell(device, subject, name) for device in DEVICES), []).append(f"`{name}`")
    return table([title, *DEVICES], [[", ".join(each), *cells] for cells, each in rows.items()])


def linears() -> str:
    """Return the table of schemes of linears."""
    return words(LINEAR, (DENSE, *SCHEMES), "weights and inputs")


def experts() -> str:
    """Return the table of schemes of the experts of a mixture."""
    return words(EXPERTS, (DENSE, *SCHEMES), "experts")


def caches() -> str:
    """Return the table of formats of the KV cache."""
    return words(CACHE, (DENSE, *KV_CACHES.values()), "KV cache")


def block_inputs() -> str:
    """Return the sentence on inputs in blocks with scales of one byte."""
    names = [f"`{name}`" for name, each in SCHEMES.items() if each.scale_type and each.activation]
    return (
        f"Inputs of {', '.join(names)} are rounded on these GPUs and multiplied as 16-bit numbers: GPUs "
        f"multiply their codes from sm_{BLOCK_INPUTS_SM} on."
    )
