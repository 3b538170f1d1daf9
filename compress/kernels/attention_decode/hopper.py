"""Decode attention for Hopper in one launch of `lanes.cu`, which documents its sums, or in two where contexts
may have several sections; `hopper_plan.py` spreads work over blocks.

Keys and values older than the step's own positions are fetched before the launch waits for the one before
it. That is sound because it reads only context lengths, block tables and pages that earlier steps wrote.
Launches since then may not write these, and one of them must wait before it lets the next one start, so that
everything before *it* is complete: `rope_store.fused` does unless `early` is set, which it never is in the
first layer of a pass. A kernel that is not launched as a programmatic dependent is complete as a whole.

Queries and the step's own positions are read after the wait. No launch ends before it has waited for the one
before it, `rope_store.fused` with `early` included, and so everything before this launch is complete then:
also the own positions of a layer without keys of its own, which the launch of an earlier layer wrote.
`q_len` counts all positions of a sequence that the pass writes. If it were less in layers without keys of
their own, the first of these would have to leave `early` unset.
"""

import ctypes
import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.kernels.attention_decode.hopper_plan import (
    CLUSTERS,
    Slicing,
    has_few_sums,
    is_tiled,
    row_bytes_of,
    row_eights_of,
    section_keys_of,
    spread_of,
)
from compress.kernels.compilers.nvrtc import Function, Launch, Source, TileMap, source_text, tile_map
from compress.kernels.operands.paged import (
    CODED_FORMATS,
    TOKEN_HEAD_FORMATS,
    PagedKV,
)
from compress.kernels.problem import Problem, compute_capability
from compress.kernels.select import Kernel, register

SM = 90
SOURCES = (
    "operands/numbers.cuh",
    "operands/global.cuh",
    "operands/shared.cuh",
    "attention_decode/lanes.cu",
)
TWO_BLOCKS_BYTES = 78 * 1024
"""Shared memory of a block of which a multiprocessor holds two, and not three."""
ONE_BLOCK_BYTES = 116 * 1024
"""Shared memory of a block of which a multiprocessor holds one."""
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Variant:
    """The constants that the kernel is compiled with."""

    dtype: torch.dtype
    kv_format: str
    head_dim: int
    block_size: int
    row_eights: int
    cluster: int
    long_table: bool
    long_lens: bool
    slicing: Slicing
    divided: bool = False
    merges: bool = False

    @property
    def coded(self) -> bool:
        return self.kv_format in CODED_FORMATS

    @property
    def tiled(self) -> bool:
        """Whether the copy engine brings slices, as TILED of lanes.cu."""
        return self.slicing.engine and is_tiled(
            self.kv_format, self.head_dim, self.block_size, self.slicing.keys
        )

    @property
    def tile_bytes(self) -> int:
        """Bytes of shared memory, as lanes.cu lays it out: for each warp and slice on its way a tile of keys
        and one of values, and the scales of both."""
        row_bytes = row_bytes_of(self.kv_format, self.head_dim)
        pitch = row_bytes if self.tiled or row_bytes // 16 % 2 else row_bytes + 16
        scale_bytes = 4 if self.kv_format in TOKEN_HEAD_FORMATS else 0
        return self.slicing.warps * self.slicing.depth * 2 * self.slicing.keys * (pitch + scale_bytes)

    def sent_bytes(self, num_rows: int) -> int:
        """Return how many bytes a warp sends to one block at most: its sums of every `cluster`-th 32 fours
        of elements."""
        fours = min(num_rows, 8 * self.row_eights) * self.head_dim // 4
        return -(-fours // (32 * self.cluster)) * 512

    def shared_bytes(self, num_rows: int) -> int:
        """Return the bytes of shared memory of a block: the tiles, and after them room for the sums of all
        warps of a cluster; a block of its own has them where its tiles were."""
        score_bytes = 2 * 32 * self.slicing.keys * self.row_eights * self.slicing.warps
        own_bytes = self.tile_bytes + score_bytes * self.slicing.specialized
        if self.cluster == 1:
            return own_bytes
        return own_bytes + self.slicing.warps * self.cluster * self.sent_bytes(num_rows)

    def asked_bytes(self, num_rows: int, num_pairs: int) -> int:
        """Return the bytes of shared memory that a launch for so many pairs of request and KV head asks for,
        each section of a context a pair of its own: where one or two blocks for each multiprocessor are all
        there are, as much as lets none take more of them than others."""
        asked = self.shared_bytes(num_rows)
        if not self.coded and self.cluster * num_pairs <= 2 * CLUSTERS[1]:
            asked = max(asked, TWO_BLOCKS_BYTES)
        row_blocks = -(-num_rows // (8 * self.row_eights))
        if self.divided and self.cluster <= 2 and row_blocks * num_pairs <= CLUSTERS[self.cluster]:
            asked = max(asked, ONE_BLOCK_BYTES)
        return asked

    @property
    def shares_multiprocessor(self) -> bool:
        """Whether the registers of a block leave room for others on its multiprocessor."""
        return has_few_sums(self.head_dim, self.row_eights) and not self.slicing.specialized

    @property
    def source(self) -> Source:
        macros = {
            "F16": int(self.dtype == torch.float16),
            "FORMAT": CODED_FORMATS.get(self.kv_format, 0),
            "C": self.head_dim,
            "LANES": self.slicing.lanes,
            "KEYS": self.slicing.keys,
            "DEPTH": self.slicing.depth,
            "WARPS": self.slicing.warps,
            "ENGINE": int(self.slicing.engine),
            "SPECIALIZED": int(self.slicing.specialized),
            "DIVIDED": int(self.divided),
            "S": self.block_size,
            "NT": self.row_eights,
            "P": self.cluster,
            "LONG_TABLE": int(self.long_table),
            "LONG_LENS": int(self.long_lens),
            "BLOCKS": -(-12 // self.slicing.warps) if self.shares_multiprocessor else 1,
        }
        entry = "merge_sections" if self.merges else "attend_lanes"
        return Source(source_text(*SOURCES), entry, tuple(macros.items()))


class _Arguments(ctypes.Structure):
    """`Args` of lanes.cu."""

    _fields_ = [
        ("k_map", TileMap),
        ("v_map", TileMap),
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "k", "v", "k_scale", "v_scale", "table", "lens", "out", "sinks", "parts")
        ),
        *((name, ctypes.c_longlong) for name in ("table_stride", "head_bytes", "scale_stride")),
        *(
            (name, ctypes.c_int)
            for name in ("num_columns", "q_len", "group", "num_kv_heads", "window", "section", "sent_bytes")
        ),
        ("scale", ctypes.c_float),
    ]


def attention_decode(
    q_THC: Tensor,
    kv: PagedKV,
    block_table_RB: Tensor,
    context_lens_R: Tensor,
    *,
    q_len: int,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return [T, H, C], T = R * q_len. A context includes the queries' own positions, already written; a row
    without a position gives zeros."""
    assert softcap is None
    num_kv_heads = kv.k.shape[0]
    (num_rows, num_heads, head_dim) = q_THC.shape
    rows_each = q_len * num_heads // num_kv_heads
    row_eights = row_eights_of(rows_each)
    longest = block_table_RB.shape[1] * kv.block_size
    section_keys = section_keys_of(window)
    sections = -(-longest // section_keys) if section_keys else 1
    slicing, cluster = spread_of(
        num_rows // q_len * num_kv_heads * sections,
        rows_each,
        kv.format,
        head_dim,
        block_size=kv.block_size,
        longest=longest if window is None else min(longest, window),
    )
    return attend(
        q_THC,
        kv,
        block_table_RB,
        context_lens_R,
        q_len=q_len,
        window=window,
        scale=scale,
        row_eights=row_eights,
        cluster=cluster,
        slicing=slicing,
        sinks_H=sinks_H,
        section_keys=section_keys if sections > 1 else None,
    )


def attend(
    q_THC: Tensor,
    kv: PagedKV,
    block_table_RB: Tensor,
    context_lens_R: Tensor,
    *,
    q_len: int,
    window: int | None,
    scale: float,
    row_eights: int,
    cluster: int,
    slicing: Slicing,
    sinks_H: Tensor | None = None,
    section_keys: int | None = None,
) -> Tensor:
    """Compute `attention_decode` with the work spread over blocks as given, which changes no bit but through
    keys and lanes of the slicing, and through the keys of a section for contexts of more; with None no
    context is divided."""
    (num_kv_heads, _, block_size, _) = kv.k.shape
    (num_rows, num_heads, head_dim) = q_THC.shape
    num_requests = num_rows // q_len
    group = num_heads // num_kv_heads
    device = q_THC.device
    assert num_rows == num_requests * q_len
    assert q_THC.is_contiguous()
    assert kv.k[0].is_contiguous()
    assert kv.k.stride() == kv.v.stride()
    assert block_table_RB.stride(1) == 1
    assert context_lens_R.is_contiguous()
    out_THC = torch.empty_like(q_THC)
    if num_requests == 0:
        return out_THC
    rows_each = q_len * group
    sections = -(-block_table_RB.shape[1] * block_size // section_keys) if section_keys else 1
    parts = (
        torch.empty(sections * num_rows * num_heads * (head_dim + 4), dtype=torch.float32, device=device)
        if section_keys
        else None
    )
    index_types = (block_table_RB.dtype == torch.int64, context_lens_R.dtype == torch.int64)
    variant = Variant(
        q_THC.dtype,
        kv.format,
        head_dim,
        block_size,
        row_eights,
        cluster,
        *index_types,
        slicing,
        bool(section_keys),
    )
    tensors = (
        q_THC,
        kv.k,
        kv.v,
        kv.k_scale,
        kv.v_scale,
        block_table_RB,
        context_lens_R,
        out_THC,
        sinks_H,
        parts,
    )
    maps = (_rows_map(each, slicing.keys) if variant.tiled else b"" for each in (kv.k, kv.v))
    arguments = _Arguments(
        *(TileMap(*each) for each in maps),
        *(None if each is None else each.data_ptr() for each in tensors),
        block_table_RB.stride(0),
        kv.k.stride(0) * kv.k.element_size(),
        kv.k_scale.stride(0) if kv.k_scale is not None and kv.k_scale.dim() else 0,
        *(
            block_table_RB.shape[1],
            q_len,
            group,
            num_kv_heads,
            window or 0,
            section_keys // slicing.keys if section_keys else 0,
            variant.sent_bytes(rows_each),
        ),
        scale,
    )
    row_blocks = -(-rows_each // (8 * row_eights))
    launch = Launch(
        grid=(cluster * num_requests * num_kv_heads, row_blocks * sections),
        threads=slicing.threads,
        shared_bytes=variant.asked_bytes(rows_each, num_requests * num_kv_heads * sections),
        cluster=cluster,
        overlap=True,
    )
    _function(variant, device)(launch, arguments, device=device)
    if section_keys:
        merge = Launch(
            grid=(num_requests * num_kv_heads, rows_each),
            threads=-(-head_dim // 32) * 32,
            shared_bytes=0,
            overlap=True,
        )
        _function(replace(variant, merges=True), device)(merge, arguments, device=device)
    return out_THC


def _rows_map(rows_HNSC: Tensor, keys: int) -> bytes:
    """Describe so many rows of a head to the copy engine, in parts of at most 128 bytes."""
    (_, _, _, numbers) = rows_HNSC.shape
    part = min(numbers, 128 // rows_HNSC.element_size())
    view = rows_HNSC.flatten(1, 2).unflatten(2, (-1, part)).transpose(1, 2)
    return tile_map(view, (1, numbers // part, keys, part))


@functools.cache
def _function(variant: Variant, device: torch.device) -> Function:
    return Function(
        variant.source,
        device=device,
        shared_bytes=max(variant.shared_bytes(8 * variant.row_eights), ONE_BLOCK_BYTES),
        sm=compute_capability(device),
    )


def supports(problem: Problem) -> str | None:
    if problem.sm != SM:
        return f"for sm_{SM}; its clusters and launches are Hopper's"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return "computes in bfloat16 or float16"
    if problem.n % 16 or problem.n > MAX_HEAD_DIM:
        return f"a head of {problem.n} dimensions is no multiple of 16 up to {MAX_HEAD_DIM}"
    if problem.softcap:
        return "its scores have no cap"
    if problem.relative or problem.alibi:
        return "its scores have no terms of the distance of keys"
    if problem.scheme in CODED_FORMATS and row_bytes_of(problem.scheme, problem.n) % 16:
        return f"a key of {problem.n} dimensions in {problem.scheme} is no multiple of 16 bytes"
    return None


register(
    Kernel(
        "attention_decode",
        "cuda.lanes",
        min_sm=SM,
        priority=20,
        supports=supports,
        fn=attention_decode,
    )
)
