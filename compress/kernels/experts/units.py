"""Units of work of experts: one expert and at most some number of its pairs. A pair is one choice of one
token, numbered t K + k.

Pairs are sorted by expert once, by one launch without the host (`units.cu`), and the grid is that of the
worst case: units past the end have no expert, -1.
"""

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.compilers.nvrtc import Function, Launch, Source, source_text
from compress.kernels.operands.gpu import gpu_of

SOURCES = ("operands/numbers.cuh", "operands/global.cuh", "experts/units.cu")


@dataclass(frozen=True)
class Deal:
    """The warps of a block, the parts of the pairs, of which each expert has a warp for each, and the most
    pairs where their ids stay in shared memory."""

    warps: int
    parts: int
    staged: int

    @property
    def owners(self) -> int:
        """Experts of a block."""
        return self.warps // self.parts


FEW = Deal(warps=8, parts=1, staged=256)
SOME = Deal(warps=8, parts=4, staged=2048)
MANY = Deal(warps=32, parts=8, staged=0)


@dataclass(frozen=True)
class Units:
    """The expert of each unit [U], -1 if it has none, and its pairs [U, N], -1 where it has fewer."""

    experts: Tensor
    pairs: Tensor


class _Arguments(ctypes.Structure):
    """`Args` of units.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("ids", "experts", "pairs")),
        *((name, ctypes.c_int) for name in ("num_pairs", "num_units", "num_experts", "size", "part_size")),
    ]


def sort_pairs(ids_TK: Tensor, num_experts: int, size: int) -> Units:
    """Return units of at most `size` pairs."""
    num_pairs = ids_TK.numel()
    num_units = min(num_pairs, num_pairs // size + min(num_pairs, num_experts))
    device = ids_TK.device
    experts = torch.empty(num_units, dtype=torch.int32, device=device)
    pairs = torch.empty(num_units, size, dtype=torch.int32, device=device)
    deal = next((each for each in (FEW, SOME) if num_pairs <= each.staged), MANY)
    part_size = -(-num_pairs // (32 * deal.parts)) * 32
    arguments = _Arguments(
        *(each.data_ptr() for each in (ids_TK, experts, pairs)),
        *(num_pairs, num_units, num_experts, size, part_size),
    )
    launch = Launch(
        grid=(-(-num_experts // deal.owners), 1),
        threads=32 * deal.warps,
        shared_bytes=0,
        overlap=gpu_of(device).sm >= 90,
    )
    _function(num_experts, deal, device)(launch, arguments, device=device)
    return Units(experts, pairs)


def source_of(num_experts: int, deal: Deal) -> Source:
    """Return the kernel for a number of experts."""
    macros = {
        "F16": 0,
        "EXPERTS": num_experts,
        "WARPS": deal.warps,
        "PARTS": deal.parts,
        "STAGED": deal.staged,
    }
    return Source(source_text(*SOURCES), "sort_pairs", tuple(macros.items()))


@functools.cache
def _function(num_experts: int, deal: Deal, device: torch.device) -> Function:
    return Function(source_of(num_experts, deal), device=device, shared_bytes=0, sm=gpu_of(device).sm)
