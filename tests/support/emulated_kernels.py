"""The CUDA kernels of a mixture of experts on a CPU: products in slices (`operands/slices.cu`), the router of
decode rows (`router/warps.cu`), pairs sorted by expert (`experts/units.cu`)."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from compress.kernels.compilers.nvrtc import Source
from compress.kernels.experts import units
from compress.kernels.operands import slices
from compress.kernels.operands.gpu import Gpu
from compress.kernels.router import warps
from tests.support.cuda_emulator import EmulatedFunction

IN_CPP = {
    "load_weight": """
static uint4 load_weight(const char* at, bool there) {
    uint4 v = {};
    if (there) memcpy(&v, at, 16);
    return v;
}
""",
    "load_row": """
static void load_row(uint4& v, const char* at, bool there) {
    if (TAIL) v = {};
    if (there) memcpy(&v, at, 16);
}
""",
    "copy_weight": """
static void copy_weight(uint4* to, const char* from, bool inside) {
    *to = {};
    if (inside) memcpy(to, from, 16);
}
""",
    "copy_row": """
static void copy_row(uint4* to, const char* from, bool inside) { copy_weight(to, from, inside); }
""",
    "end_copies": "static void end_copies() {}\n",
    "await_copies": "template <int> static void await_copies() {}\n",
    "load_index": "static int load_index(const int* at) { return *at; }\n",
    "load_float": "static float load_float(const float* at) { return *at; }\n",
    "numbers": """
static u32 numbers(u32 words, int i, u32 offset) {
    u32 pair = 0;
    for (int h = 0; h < 2; ++h) {
        const float code = words >> (16 * h + 4 * i) & 15;
        pair |= (u32)narrow(code + (F16 ? 1024.0f : 128.0f) + widen(offset >> 16 * h)) << 16 * h;
    }
    return pair;
}
""",
}
"""What slices.cu has in PTX."""


ROUTER_IN_CPP = {
    "load_row": """
static uint4 load_row(const u16* at) {
    uint4 v;
    memcpy(&v, at, 16);
    return v;
}
""",
    "load_float": IN_CPP["load_float"],
}
"""What warps.cu has in PTX."""


UNITS_IN_CPP = {"load_index": IN_CPP["load_index"]}


KERNELS: dict[ModuleType, tuple[Callable[[Any], Source], dict[str, str]]] = {
    slices: (lambda made: made.source, IN_CPP),
    warps: (lambda made: made.source, ROUTER_IN_CPP),
    units: (units.source_of, UNITS_IN_CPP),
}
"""The source of a compiled variant, and what it has in PTX, by the module that launches it."""


def use_emulated(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let these kernels run on this CPU; what is compiled for it stays in `folder`."""
    for module in KERNELS:
        monkeypatch.setattr(module, "_function", partial(_emulated, module, folder))
        monkeypatch.setattr(module, "gpu_of", lambda device: Gpu(80, 108, 0))


def _emulated(module: ModuleType, folder: Path, made: Any, device: torch.device) -> EmulatedFunction:
    del device
    source_of, replaced = KERNELS[module]
    return EmulatedFunction(source_of(made), replaced, folder)
