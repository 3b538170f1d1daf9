"""Prefill attention with products in FP8 on Hopper: launches `fp8.cu`, which documents its arithmetic, over
keys and values that `fp8_tiles.py` lays out. Its numbers are those of `fp8_reference.py`.

A block has 128 rows, a tile of query tokens and the heads of one KV head; the tiles with the most keys are
first. A row's bits depend on its own query and on the tiles of its context that it sees.
"""

import ctypes
import functools

import torch
from torch import Tensor

from compress.kernels.attention_prefill import fp8_reference
from compress.kernels.attention_prefill.fp8_reference import KEYS
from compress.kernels.attention_prefill.fp8_tiles import MORE_ROWS, laid_out
from compress.kernels.compilers.nvrtc import Function, Launch, Source, source_text
from compress.kernels.compilers.triton import triton_refusal
from compress.kernels.operands.gpu import gpu_of
from compress.kernels.operands.paged import PagedKV
from compress.kernels.operands.tiles import FixedLists, query_tiles
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register

SM = 90
SOURCES = ("operands/numbers.cuh", "operands/shared.cuh", "attention_prefill/fp8.cu")
ROWS = 128
"""Rows of a block, a half for each of two warpgroups."""
THREADS = 384
MAX_STAGES = 8
_ALIGNMENT = 1024
_STATIC_BYTES = 1024
"""Shared memory that the kernel declares for barriers, with a margin."""


class _Arguments(ctypes.Structure):
    """`Args` of fp8.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "tiles", "table", "out")),
        *((name, ctypes.c_longlong) for name in ("table_stride", "tiles_of_head")),
        *((name, ctypes.c_int) for name in ("num_kv_heads", "group", "window")),
        ("scale", ctypes.c_float),
    ]


def attention_prefill(
    q_THC: Tensor,
    kv: PagedKV,
    block_table_RB: Tensor,
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    *,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    lists: FixedLists | None = None,
) -> Tensor:
    """Return [T, H, C]; the queries of a sequence are the last of its context, whose keys and values are all
    in the pages. With `lists`, those of these chunks, the launches serve a CUDA graph."""
    assert softcap is None
    assert sinks_H is None
    assert q_THC.is_contiguous()
    (num_rows, num_heads, head_dim) = q_THC.shape
    assert num_rows == sum(query_lens)
    num_kv_heads = kv.k.shape[0]
    group = num_heads // num_kv_heads
    device = q_THC.device
    out_THC = torch.empty_like(q_THC)
    if num_rows == 0:
        return out_THC
    keys = laid_out(kv, block_table_RB, context_lens, lists)
    size = ROWS // group
    tiles = query_tiles(query_lens, context_lens, size, device) if lists is None else lists.query_tiles(size)
    arguments = _Arguments(
        *(each.data_ptr() for each in (q_THC, keys.k, keys.v, tiles, keys.table, out_THC)),
        keys.table.stride(0),
        keys.k.shape[1],
        num_kv_heads,
        group,
        window or 0,
        scale,
    )
    stages = stages_of(head_dim, gpu_of(device).shared_bytes)
    launch = Launch(
        grid=(len(tiles) * num_kv_heads, 1),
        threads=THREADS,
        shared_bytes=_ALIGNMENT + stages * stage_bytes(head_dim),
        overlap=True,
    )
    _function(q_THC.dtype, head_dim, stages, device)(launch, arguments, device=device)
    return out_THC


def stage_bytes(head_dim: int) -> int:
    """Return the bytes of a tile of keys and one of values."""
    return (KEYS + head_dim + MORE_ROWS) * KEYS


def stages_of(head_dim: int, shared_bytes: int) -> int:
    """Return how many tiles of keys and values are in flight."""
    return min(MAX_STAGES, (shared_bytes - _STATIC_BYTES - _ALIGNMENT) // stage_bytes(head_dim))


def source(dtype: torch.dtype, head_dim: int, stages: int) -> Source:
    """Return fp8.cu with its constants."""
    macros = (("F16", int(dtype == torch.float16)), ("C", head_dim), ("KEYS", KEYS), ("STAGES", stages))
    return Source(source_text(*SOURCES), "attend_fp8", macros)


@functools.cache
def _function(dtype: torch.dtype, head_dim: int, stages: int, device: torch.device) -> Function:
    gpu = gpu_of(device)
    return Function(
        source(dtype, head_dim, stages),
        device=device,
        shared_bytes=gpu.shared_bytes - _STATIC_BYTES,
        sm=gpu.sm,
    )


def supports(problem: Problem) -> str | None:
    if reason := fp8_reference.supports(problem):
        return reason
    if problem.sm != SM:
        return f"for sm_{SM}; its products are Hopper's"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return "reads queries in bfloat16 or float16"
    if problem.k > ROWS:
        return f"for up to {ROWS} query heads of a KV head"
    return triton_refusal(problem)


register(
    Kernel(
        "attention_prefill",
        "cuda.fp8",
        min_sm=SM,
        priority=20,
        supports=supports,
        fn=attention_prefill,
        takes_lists=True,
    )
)
