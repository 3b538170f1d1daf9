"""Attention over paged keys and values: one query a request over full contexts, and whole prompts beside
torch's own attention.

Shapes: T rows, H heads, K kv heads, C head dimension, R requests, B blocks of a table, L context, P sampled
queries, G queries a kv head.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.operands.paged import PagedKV, empty_pages
from compress.kernels.problem import Op, Phase
from compress.kernels.select import Kernel, select
from compress.quant.kv import FP8_ATTENTION
from scripts.kernel_bench.case import (
    MIN_LAUNCHES,
    Bench,
    Case,
    bytes_per_position,
    clone_pages,
    relative_error,
)
from scripts.kernel_bench.timer import num_copies, walk

_SAMPLED_QUERIES = 64
_PREFILL_LAUNCHES = 8
E4M3_ERROR = 2**-4
"""Relative error of attention in FP8 beside exact attention over the same pages: of one rounding to e4m3, at
most."""


def attention_decode_cases(
    bench: Bench,
    *,
    kv_formats: Sequence[str],
    contexts: Sequence[int],
    batch_sizes: Sequence[int],
    block_size: int,
) -> Iterator[Case]:
    for kv_format, context, batch_size in product(kv_formats, contexts, batch_sizes):
        kernel = _attention_kernel(bench, "attention_decode", kv_format)
        yield from decode_cases_of(
            bench, {kernel.name: kernel.fn}, kv_format=kv_format, context=context, batch_size=batch_size,
            block_size=block_size,
        )  # fmt: skip


def decode_cases_of(
    bench: Bench,
    attentions: Mapping[str, Callable[..., Tensor]],
    *,
    kv_format: str,
    context: int,
    batch_size: int,
    block_size: int,
) -> Iterator[Case]:
    """One case for each of these functions, by name, over the same pages."""
    layer = bench.arch.layers[0]
    scale = layer.head_dim**-0.5
    kv, tables_RB = _pages(bench, kv_format, batch_size, context, block_size)
    num_bytes = batch_size * context * bytes_per_position(kv)
    q_THC = bench.randn(batch_size, layer.num_heads, layer.head_dim)
    lens_R = torch.full((batch_size,), context, dtype=torch.int64, device=bench.device)
    rows = [_attend_f64(q_THC[r : r + 1], kv, tables_RB[r], [context - 1], scale) for r in range(batch_size)]
    copies = [kv, *(clone_pages(kv) for _ in range(num_copies(num_bytes, bench.device) - 1))]
    facts: dict[str, Any] = {"block_table_RB": tables_RB, "context_lens_R": lens_R, "q_len": 1}
    for name, attend in attentions.items():
        launches = [partial(attend, q_THC, kv=each, window=None, scale=scale, **facts) for each in copies]
        yield Case(
            tool="compress",
            op="attention_decode",
            name=f"context {context}",
            scheme=kv_format,
            m=batch_size,
            kernel=name,
            num_bytes=num_bytes,
            flops=4 * batch_size * context * layer.num_heads * layer.head_dim,
            launches=walk(launches, at_least=MIN_LAUNCHES),
            error=partial(relative_error, expected=torch.cat(rows)),
            limit=bench.rounding(context),
            shape=(layer.num_heads, layer.num_kv_heads, layer.head_dim),
        )


def attention_prefill_cases(
    bench: Bench, *, kv_formats: Sequence[str], lengths: Sequence[int], block_size: int
) -> Iterator[Case]:
    """One whole sequence. Its reference looks at some of the queries."""
    layer = bench.arch.layers[0]
    num_heads = layer.num_heads
    num_kv_heads = layer.num_kv_heads
    head_dim = layer.head_dim
    for length in lengths:
        q_THC = bench.randn(length, num_heads, head_dim)
        shared: dict[str, Any] = {
            "op": "attention_prefill",
            "name": f"length {length}",
            "m": length,
            "flops": 2 * length * (length + 1) * num_heads * head_dim,
            "phase": "prefill",
            "in_graph": False,
            "shape": (num_heads, num_kv_heads, head_dim),
        }
        seen = torch.linspace(0, length - 1, min(length, _SAMPLED_QUERIES)).long().tolist()
        for kv_format in kv_formats:
            kernel = _attention_kernel(bench, "attention_prefill", kv_format)
            kv, tables_RB = _pages(bench, kv_format, 1, length, block_size)
            expected = _attend_f64(q_THC[seen], kv, tables_RB[0], seen, head_dim**-0.5)
            call = partial(
                kernel.fn, q_THC, kv, tables_RB, (length,), (length,), window=None, scale=head_dim**-0.5
            )
            yield Case(
                tool="compress",
                scheme=kv_format,
                kernel=kernel.name,
                num_bytes=length * bytes_per_position(kv),
                launches=walk([call], at_least=_PREFILL_LAUNCHES),
                error=partial(_sampled_error, rows=seen, expected=expected),
                limit=E4M3_ERROR if kv_format == FP8_ATTENTION else bench.rounding(length),
                **shared,
            )
        yield _sdpa_case(bench, q_THC, shared)


def _sdpa_case(bench: Bench, q_THC: Tensor, shared: dict[str, Any]) -> Case:
    """torch's own attention over dense keys and values."""
    length = q_THC.shape[0]
    num_kv_heads = bench.arch.layers[0].num_kv_heads
    head_dim = q_THC.shape[2]
    q, k, v = (
        each.transpose(0, 1).unsqueeze(0).contiguous()
        for each in (q_THC, *(bench.randn(length, num_kv_heads, head_dim),) * 2)
    )
    call = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    num_bytes = 2 * k.numel() * k.element_size()
    return Case(
        tool="torch",
        scheme=bench.dense,
        kernel="sdpa",
        num_bytes=num_bytes,
        launches=walk([call], at_least=_PREFILL_LAUNCHES),
        error=None,
        limit=0.0,
        **shared,
    )


def _sampled_error(out_THC: Tensor, *, rows: list[int], expected: Tensor) -> float:
    return relative_error(out_THC[rows], expected) if bool(out_THC.isfinite().all()) else math.inf


def _attention_kernel(bench: Bench, op: Op, kv_format: str) -> Kernel:
    layer = bench.arch.layers[0]
    phase: Phase = "prefill" if op == "attention_prefill" else "decode"
    return select(
        bench.target.kernel_device.problem(
            op, n=layer.head_dim, k=layer.num_heads // layer.num_kv_heads, phase=phase, scheme=kv_format
        )
    )


def _pages(
    bench: Bench, kv_format: str, num_requests: int, length: int, block_size: int
) -> tuple[PagedKV, Tensor]:
    """Full pages, the requests' blocks in random order; block 0 belongs to nobody."""
    layer = bench.arch.layers[0]
    generator = bench.generator()
    blocks_each = -(-length // block_size)
    num_blocks = num_requests * blocks_each + 1
    kv = empty_pages(kv_format, (layer.num_kv_heads, num_blocks, block_size, layer.head_dim), bench.device)
    order = torch.randperm(num_blocks - 1, generator=generator, device=bench.device) + 1
    for part in torch.split(torch.arange(num_blocks * block_size, device=bench.device), 1 << 16):
        k, v = (
            torch.randn(
                len(part), layer.num_kv_heads, layer.head_dim, generator=generator, device=bench.device
            )
            for _ in "kv"
        )
        kv.write_(part, k.to(bench.dtype), v.to(bench.dtype))
    return kv, order.view(num_requests, blocks_each)


def _attend_f64(q_PHC: Tensor, kv: PagedKV, blocks_B: Tensor, positions: list[int], scale: float) -> Tensor:
    """Queries at `positions` of one sequence, each over all positions up to its own."""
    num_queries, num_heads, head_dim = q_PHC.shape
    k_KLC, v_KLC = kv.gather(blocks_B, max(positions) + 1, torch.float64)
    q_KGC = (
        q_PHC.to(torch.float64)
        .view(num_queries, k_KLC.shape[0], -1, head_dim)
        .permute(1, 2, 0, 3)
        .flatten(1, 2)
    )
    scores = (q_KGC @ k_KLC.transpose(1, 2)).view(k_KLC.shape[0], -1, num_queries, k_KLC.shape[1]) * scale
    later = torch.arange(k_KLC.shape[1], device=scores.device) > torch.tensor(
        positions, device=scores.device
    ).unsqueeze(1)
    weights = scores.masked_fill(later, -math.inf).softmax(dim=-1)
    out = weights.flatten(1, 2) @ v_KLC
    return (
        out.view(k_KLC.shape[0], -1, num_queries, head_dim)
        .permute(2, 0, 1, 3)
        .reshape(num_queries, num_heads, head_dim)
    )
