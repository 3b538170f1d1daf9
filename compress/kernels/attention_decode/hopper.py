"""Decode attention for Hopper in one launch: the plan of `lanes.cu`, which documents its sums, and how work
is spread over blocks.

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

from compress.kernels.compilers.nvrtc import Function, Launch, Source, TileMap, source_text, tile_map
from compress.kernels.operands.paged import (
    CODED_FORMATS,
    INT4_TOKEN_HEAD,
    SHORT_CONTEXT,
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
CLUSTERS = {8: 15, 4: 30, 2: 66, 1: 132}
"""Numbers of blocks that may share a request and KV head, and how many such clusters an H200 holds with one
block on each multiprocessor. A cluster of more than two stays within one group of multiprocessors, and the
rest of the group is idle (`linear/stream_plan.py`)."""
TWO_BLOCKS_BYTES = 78 * 1024
"""Shared memory of a block of which a multiprocessor holds two, and not three."""
MAX_HEAD_DIM = 256
MAX_LANES = 8
"""Lanes of one warp at most."""
_SUMS = 128
"""Registers of a thread for sums."""


@dataclass(frozen=True)
class Slicing:
    """How a context is cut: keys of a slice and lanes of slices, on which the bits depend; slices that a warp
    has on their way, warps of a block and whether the copy engine brings slices, on which only the time
    does."""

    keys: int
    lanes: int
    depth: int
    warps: int = 4
    engine: bool = False


def slicing_of(kv_format: str, head_dim: int) -> Slicing:
    """Return how contexts of a format and head dimension are cut. Wide heads have more lanes: a slice of
    theirs has as many bytes as two of others, and a single request with eight KV heads would keep 32
    multiprocessors busy. Codes are a half or a quarter of the bytes, and so two slices are on their way."""
    lanes = 16 if head_dim <= 128 else 32
    if kv_format in CODED_FORMATS:
        return Slicing(keys=32, lanes=lanes, depth=2)
    return Slicing(keys=32 if head_dim <= 128 else 16, lanes=lanes, depth=1)


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

    @property
    def coded(self) -> bool:
        return self.kv_format in CODED_FORMATS

    @property
    def tiled(self) -> bool:
        """Whether the copy engine brings slices, as TILED of lanes.cu."""
        row_bytes = row_bytes_of(self.kv_format, self.head_dim)
        fits = self.block_size % self.slicing.keys == 0 and (row_bytes in (32, 64) or row_bytes % 128 == 0)
        return self.slicing.engine and fits

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
        if self.cluster == 1:
            return self.tile_bytes
        return self.tile_bytes + self.slicing.warps * self.cluster * self.sent_bytes(num_rows)

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
            "S": self.block_size,
            "NT": self.row_eights,
            "P": self.cluster,
            "LONG_TABLE": int(self.long_table),
            "LONG_LENS": int(self.long_lens),
            "BLOCKS": -(-12 // self.slicing.warps) if _has_few_sums(self.head_dim, self.row_eights) else 1,
        }
        return Source(source_text(*SOURCES), "attend_lanes", tuple(macros.items()))


class _Arguments(ctypes.Structure):
    """`Args` of lanes.cu."""

    _fields_ = [
        ("k_map", TileMap),
        ("v_map", TileMap),
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "k", "v", "k_scale", "v_scale", "table", "lens", "out", "sinks")
        ),
        *((name, ctypes.c_longlong) for name in ("table_stride", "head_bytes", "scale_stride")),
        *(
            (name, ctypes.c_int)
            for name in ("num_columns", "q_len", "group", "num_kv_heads", "window", "sent_bytes")
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
    slicing, cluster = spread_of(
        num_rows // q_len * num_kv_heads,
        rows_each,
        kv.format,
        head_dim,
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
    )


def row_eights_of(num_rows: int) -> int:
    """Return how many eights of query rows a block takes at once: their sums fill its registers. More rows
    need more blocks, each of which reads the keys again."""
    return 1 if num_rows <= 8 else 2


def row_bytes_of(kv_format: str, head_dim: int) -> int:
    """Return the bytes of a key."""
    return {INT4_TOKEN_HEAD: head_dim // 2}.get(
        kv_format, head_dim if kv_format in CODED_FORMATS else 2 * head_dim
    )


def spread_of(
    pairs: int, num_rows: int, kv_format: str, head_dim: int, *, longest: int
) -> tuple[Slicing, int]:
    """Return how contexts are cut and how many blocks share one, given the number of pairs of request and KV
    head, of query rows of each, and of positions of a context at most.

    Few pairs have eight blocks each, whose two warps have a lane each. While every block has a multiprocessor
    to itself, two slices of keys of 16 bits are on their way: nothing else hides how long one takes to
    arrive. Keys of four bits arrive faster than eight warps of a multiprocessor work them off: where two
    blocks for each pair are there at once, they have eight warps each. Of other keys, more pairs than that
    have two blocks each all the same, up to four pairs for a multiprocessor, because smaller blocks leave
    less to a last round of few; they have two warps where contexts are short, so that more of them are there
    at once. `docs/LOG.md` (2026-11-26) has the times.
    """
    slicing = slicing_of(kv_format, head_dim)
    eights = row_eights_of(num_rows)
    if slicing.lanes == 16 and pairs <= CLUSTERS[8] and num_rows <= 16:
        return replace(slicing, warps=2, depth=2), 8
    cluster = cluster_of(pairs, eights, head_dim, slicing, coded=kv_format in CODED_FORMATS)
    if pairs <= CLUSTERS[cluster] and kv_format not in CODED_FORMATS and head_dim <= 128 and eights == 1:
        return replace(slicing, depth=2), cluster
    if kv_format == INT4_TOKEN_HEAD:
        small = head_dim <= 128 and num_rows <= 4  # two blocks fit, with room for the sums of all warps
        if small and cluster == 2 and pairs <= 2 * CLUSTERS[2]:
            slicing = replace(slicing, warps=8)
    elif cluster == 1 and _has_few_sums(head_dim, eights):
        rounds = pairs / CLUSTERS[1]
        if rounds <= 4 and not 2.7 < rounds <= 3:  # three blocks fit, and nearly fill, a multiprocessor
            slicing, cluster = replace(slicing, warps=2 if longest <= SHORT_CONTEXT else 4), 2
    return slicing, cluster


def cluster_of(pairs: int, row_eights: int, head_dim: int, slicing: Slicing, *, coded: bool) -> int:
    """Return the number of blocks for each pair of request and KV head, given the number of pairs: as many
    as are there at once. Tiles of codes are smaller, so that a multiprocessor holds three blocks; of clusters
    of four, which stay in a group of multiprocessors, only two are quick."""
    of_small = 3 if coded and _has_few_sums(head_dim, row_eights) else 2
    least = _least_cluster(row_eights, head_dim, slicing)
    return next(
        each
        for each in clusters_of(slicing)
        if each == least or pairs <= (of_small if each <= 2 else 2) * CLUSTERS[each]
    )


def _has_few_sums(head_dim: int, row_eights: int) -> bool:
    """Return whether the registers of three blocks fit a multiprocessor."""
    return head_dim * row_eights <= 128


def _least_cluster(row_eights: int, head_dim: int, slicing: Slicing) -> int:
    """Return the smallest cluster whose accumulators fit the registers. Fewer blocks have more lanes in a
    warp, and each lane holds log2(lanes of the warp) sums of others next to its own."""
    sums = head_dim // 4 * row_eights
    lanes = slicing.lanes // slicing.warps
    clusters = clusters_of(slicing)
    return next(
        (each for each in reversed(clusters) if sums * (lanes // each).bit_length() <= _SUMS), clusters[0]
    )


def clusters_of(slicing: Slicing) -> tuple[int, ...]:
    """Return the sizes of clusters in which every warp has a lane and at most `MAX_LANES`."""
    return tuple(
        each for each in CLUSTERS if slicing.warps * each <= slicing.lanes <= MAX_LANES * slicing.warps * each
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
) -> Tensor:
    """Compute `attention_decode` with the work spread over blocks as given, which changes no bit but through
    keys and lanes of the slicing."""
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
    index_types = (block_table_RB.dtype == torch.int64, context_lens_R.dtype == torch.int64)
    variant = Variant(
        q_THC.dtype, kv.format, head_dim, block_size, row_eights, cluster, *index_types, slicing
    )
    tensors = (q_THC, kv.k, kv.v, kv.k_scale, kv.v_scale, block_table_RB, context_lens_R, out_THC, sinks_H)
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
            variant.sent_bytes(q_len * group),
        ),
        scale,
    )
    shared_bytes = variant.shared_bytes(q_len * group)
    if not variant.coded and cluster * num_requests * num_kv_heads <= 2 * CLUSTERS[1]:
        shared_bytes = max(shared_bytes, TWO_BLOCKS_BYTES)  # else some multiprocessors would take three
    launch = Launch(
        grid=(cluster * num_requests * num_kv_heads, -(-q_len * group // (8 * row_eights))),
        threads=slicing.warps * 32,
        shared_bytes=shared_bytes,
        cluster=cluster,
        overlap=True,
    )
    _function(variant, device)(launch, arguments, device=device)
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
        shared_bytes=max(variant.shared_bytes(8 * variant.row_eights), TWO_BLOCKS_BYTES),
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
    if problem.relative:
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
