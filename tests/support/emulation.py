"""Emulation of other x86-64 CPUs: variables that choose the instruction sets of libraries.

    ATEN_CPU_CAPABILITY       PyTorch's own loops: default (SSE2), avx2, avx512
    ONEDNN_MAX_CPU_ISA        oneDNN: 16-bit and 8-bit products
    MKL_ENABLE_INSTRUCTIONS   MKL: float32 products, exponentials; obeyed on Intel's CPUs only
    MKL_CBWR=COMPATIBLE       MKL: its oldest code, on any CPU
    OPENBLAS_CORETYPE         numpy's products, which Triton's interpreter uses
    FBGEMM_ENABLE_INSTRUCTIONS  FBGEMM: bags of embeddings, which multiply by codes

For AMD's CPUs MKL has code of its own (`mkl_blas_def_xsgemm_bdz`) and no variable. It calls exported
functions to find out which CPU it runs on, and a preloaded library replaces them.

Variables must be set before a library is loaded, so an emulation is a child process. It finds its name in
COMPRESS_EMULATION.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

VARIABLE = "COMPRESS_EMULATION"
EMULATED = os.environ.get(VARIABLE)
"""Name of the emulation that this process runs under, or None."""
_AMD_ANSWERS = """
int mkl_serv_intel_cpu_true(void) { return 0; }
int mkl_serv_intel_cpu(void) { return 0; }
int mkl_serv_cpuiszen(void) { return 1; }
int mkl_serv_cpuisbulldozer(void) { return 0; }
"""


@dataclass(frozen=True)
class Emulation:
    """A CPU: variables, and what PyTorch, MKL and oneDNN report under them. `needs` is a flag of
    /proc/cpuinfo."""

    variables: Mapping[str, str]
    aten: str
    mkl: str
    onednn: str
    needs: str = "avx2"
    amd: bool = False

    @property
    def refusal(self) -> str | None:
        """The reason why this machine cannot emulate it, or None."""
        if self.needs not in cpu_flags():
            return f"the CPU has no {self.needs}"
        if self.amd and shutil.which("cc") is None:
            return "the answers of an AMD CPU need a C compiler"
        return None

    def environment(self, name: str, directory: Path) -> dict[str, str]:
        """Return variables for a child process; a library to preload is built in `directory`."""
        variables = {**self.variables, VARIABLE: name}
        if self.amd:
            variables["LD_PRELOAD"] = str(_amd_answers(directory))
        return variables


EMULATIONS = {
    "avx512_without_vnni": Emulation(
        {
            "ATEN_CPU_CAPABILITY": "avx512",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512",
            "OPENBLAS_CORETYPE": "SkylakeX",
        },
        aten="AVX512",
        mkl="AVX-512",
        onednn="Intel AVX-512 with AVX512BW, AVX512VL, and AVX512DQ extensions",
        needs="avx512bw",
    ),
    "avx2": Emulation(
        {
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "OPENBLAS_CORETYPE": "Haswell",
            "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
        },
        aten="AVX2",
        mkl="(Intel(R) AVX2)",
        onednn="Intel AVX2",
    ),
    "sse4_2": Emulation(
        {
            "ATEN_CPU_CAPABILITY": "default",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
            "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
            "OPENBLAS_CORETYPE": "Nehalem",
        },
        aten="DEFAULT",
        mkl="SSE4.2",
        onednn="Intel SSE4.1",
    ),
    "mkl_compatible": Emulation(
        {
            "ATEN_CPU_CAPABILITY": "default",
            "ONEDNN_MAX_CPU_ISA": "AVX",
            "MKL_CBWR": "COMPATIBLE",
            "OPENBLAS_CORETYPE": "Sandybridge",
        },
        aten="DEFAULT",
        mkl="Intel(R) Architecture processors",
        onednn="Intel AVX",
    ),
    "amd_zen3": Emulation(
        {
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "OPENBLAS_CORETYPE": "Zen",
            "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
        },
        aten="AVX2",
        mkl="Intel(R) Architecture processors",
        onednn="Intel AVX2",
        amd=True,
    ),
}


@cache
def cpu_flags() -> frozenset[str]:
    """Return the flags of the first CPU in /proc/cpuinfo."""
    return frozenset(_cpuinfo("flags").split())


@cache
def is_intel() -> bool:
    """Return whether MKL obeys MKL_ENABLE_INSTRUCTIONS on this CPU."""
    return _cpuinfo("vendor_id") == "GenuineIntel"


def _cpuinfo(key: str) -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _amd_answers(directory: Path) -> Path:
    source = directory / "amd_answers.c"
    source.write_text(_AMD_ANSWERS)
    library = directory / "amd_answers.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library
