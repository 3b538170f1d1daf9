"""Runs CUDA kernels on a CPU: `EmulatedFunction` takes the place of `nvrtc.Function`.

The source is compiled by g++ against `cuda_emulator.hpp`, for sm_80. A function that holds PTX is written
again in C++: those that kernels share there, those of one kernel in the text given with it.
"""

import ctypes
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from compress.kernels.compilers.nvrtc import Launch, Source

HERE = Path(__file__).parent
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
SHARED = ("widen", "narrow", "prefetch", "policy_of", "larger", "mma")
"""Functions that the header has in place of the source's."""
MAIN = """
static const Args* arguments_of_launch;
static void one_thread() { ENTRY(*arguments_of_launch); }
extern "C" void launch(const Args* arguments, unsigned blocks_x, unsigned blocks_y, unsigned num_threads) {
    arguments_of_launch = arguments;
    gridDim = {blocks_x, blocks_y}, blockDim = {num_threads, 1};
    threads.resize(num_threads);
    for (Thread& each : threads) each.stack.resize(1 << 16);
    for (unsigned y = 0; y < blocks_y; ++y)
        for (unsigned x = 0; x < blocks_x; ++x) {
            blockIdx = {x, y};
            for (float& each : shared_sums) each = NAN;
            memset(shared_memory, 255, sizeof shared_memory);
            run_block(one_thread);
        }
}
"""


class EmulatedFunction:
    """A kernel that runs on the host. `replaced` is C++ in place of functions of the source, by name."""

    def __init__(self, source: Source, replaced: dict[str, str], folder: Path) -> None:
        text = source.text.replace("extern __shared__", "extern")
        for name in (*SHARED, *replaced):
            text = without(text, name)
        first = text.index("struct Args")
        text = f"{text[:first]}{''.join(replaced.values())}\n{text[first:]}"
        macros = "".join(f"#define {name} {value}\n" for name, value in source.macros)
        header = (HERE / "cuda_emulator.hpp").read_text()
        whole = f"{macros}#define __CUDA_ARCH__ 800\n{header}{text}{MAIN.replace('ENTRY', source.entry)}"
        name = hashlib.sha256(whole.encode()).hexdigest()[:16]
        path = folder / f"{name}.so"
        if not path.exists():
            written = folder / f"{name}.cpp"
            written.write_text(whole)
            command = ["g++", "-std=c++17", "-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC"]
            done = subprocess.run(
                [*command, str(written), "-o", str(path)], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr[:4000]
        self._launch = ctypes.CDLL(str(path)).launch

    def __call__(self, launch: Launch, arguments: ctypes.Structure, *, device: torch.device) -> None:
        del device
        self._launch(ctypes.byref(arguments), *launch.grid, launch.threads)


def without(text: str, name: str) -> str:
    """Return a source without its definitions of a function, or the macro calls that define it."""
    text = re.sub(rf"^[A-Z0-9]+\({name}, .*$", "", text, flags=re.MULTILINE)
    pattern = rf"^(template <[^>]*> )?__device__ __forceinline__ [\w ]+ {name}\("
    while found := re.search(pattern, text, flags=re.MULTILINE):
        depth = 0
        for at in range(text.index("{", found.start()), len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                break
        text = text[: found.start()] + text[at + 1 :]
    return text
