"""Ops of a row: norms, gated activation, quantization, the Hadamard transform of query heads, rope with the
cache's write, sampling; beside each the reference in torch ops.

Rows are warm in the caches, as they are behind the op that made them.

Shapes: T rows, D hidden, F ffn, H query heads, C head dimension, P positions, R requests, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.paged import PagedKV, empty_pages
from compress.kernels.operands.rows import INT8, ActivationQuant, QuantizedRows
from compress.kernels.problem import Op
from compress.kernels.select import KERNELS, Kernel, select
from compress.models.layer_shape import XIELU
from compress.models.rope import cos_sin
from compress.models.xielu import initial_parameters, xielu_numbers
from compress.runtime.request import SamplingParams
from compress.runtime.sampler import SamplingPlan, SamplingRows, sample_rows
from scripts.kernel_bench.case import (
    DECODE_ROWS,
    MIN_LAUNCHES,
    Bench,
    Case,
    bytes_per_position,
    launches_of,
    relative_error,
)
from scripts.kernel_bench.timer import Launch, walk


def row_cases(bench: Bench) -> Iterator[Case]:
    """Row-wise ops, each as it is and with quantized output, beside the reference kernel in plain
    torch ops."""
    arch = bench.arch
    layer = arch.layers[0]
    most = max(bench.rows)
    hidden_size = arch.hidden_size
    ffn_size = layer.intermediate_size
    x_TD = bench.randn(most, hidden_size)
    reads = 2 if layer.gated else 1
    gate_up_TF = bench.randn(most, reads * ffn_size)
    parameters = [each.to(bench.device) for each in initial_parameters().values()]
    numbers = {"xielu_4": xielu_numbers(*parameters)} if arch.activation == XIELU else {}
    weight = bench.randn(hidden_size)
    width = bench.dtype.itemsize
    dynamic = ActivationQuant()
    whole = ActivationQuant(dtype=INT8)
    fp8 = "FP8_DYNAMIC"
    int8 = "INT8_DYNAMIC"
    calls: list[tuple[Op, int, str, Callable[[int], tuple[Any, ...]], int]] = [
        (
            "rms_norm",
            hidden_size,
            bench.dense,
            lambda m: (x_TD[:m], weight, arch.norm_eps),
            2 * width * hidden_size,
        ),
        (
            "rms_norm",
            hidden_size,
            fp8,
            lambda m: (x_TD[:m], weight, arch.norm_eps, dynamic),
            (width + 1) * hidden_size,
        ),
        (
            "rms_norm",
            hidden_size,
            int8,
            lambda m: (x_TD[:m], weight, arch.norm_eps, whole),
            (width + 1) * hidden_size,
        ),
        (
            "act_mul",
            ffn_size,
            bench.dense,
            lambda m: (gate_up_TF[:m], arch.activation),
            (reads + 1) * width * ffn_size,
        ),
        (
            "act_mul",
            ffn_size,
            fp8,
            lambda m: (gate_up_TF[:m], arch.activation, dynamic),
            (reads * width + 1) * ffn_size,
        ),
        (
            "act_mul",
            ffn_size,
            int8,
            lambda m: (gate_up_TF[:m], arch.activation, whole),
            (reads * width + 1) * ffn_size,
        ),
        ("quantize_rows", hidden_size, int8, lambda m: (x_TD[:m], whole), (width + 1) * hidden_size),
        ("quantize_rows", hidden_size, fp8, lambda m: (x_TD[:m], dynamic), (width + 1) * hidden_size),
    ]
    if layer.head_dim.bit_count() == 1:
        heads_THC = bench.randn(most, layer.num_heads, layer.head_dim)
        calls.append(
            (
                "hadamard",
                layer.head_dim,
                bench.dense,
                lambda m: (heads_THC[:m],),
                2 * width * layer.num_heads * layer.head_dim,
            )
        )
    for op, size, scheme, arguments, row_bytes in calls:
        kernel = select(bench.target.kernel_device.problem(op, n=size))
        reference = KERNELS[op].get("reference")
        named = {**numbers, "gated": layer.gated} if op == "act_mul" else {}
        for m in bench.rows:
            expected = _dense_f64(reference.fn(*arguments(m), **named))
            for tool, each in _beside(kernel, reference):
                launch = partial(each.fn, *arguments(m), **named)
                yield Case(
                    tool=tool,
                    op=op,
                    name=f"{op} {size}",
                    scheme=scheme,
                    m=m,
                    kernel=each.name,
                    num_bytes=m * row_bytes,
                    flops=0,
                    launches=walk([launch], at_least=launches_of(bench, m)),
                    error=partial(_row_error, expected=expected),
                    limit=bench.rounding(size),
                    phase="decode" if m <= DECODE_ROWS else "prefill",
                    shape=(size,),
                )


def _beside(kernel: Kernel, reference: Kernel) -> list[tuple[str, Kernel]]:
    return [("compress", kernel)] if kernel is reference else [("compress", kernel), ("torch", reference)]


def rope_store_cases(bench: Bench, *, kv_formats: Sequence[str], block_size: int) -> Iterator[Case]:
    layer = bench.arch.layers[0]
    num_heads = layer.num_heads
    num_kv_heads = layer.num_kv_heads
    head_dim = layer.head_dim
    most = max(bench.rows)
    positions_T = torch.arange(most, device=bench.device)
    cos_PC, sin_PC = cos_sin(layer.rope, head_dim, positions_T, bench.dtype)
    qkv_TF = bench.randn(most, (num_heads + 2 * num_kv_heads) * head_dim)
    qk_norm = bench.randn(num_heads + num_kv_heads, head_dim) if bench.arch.qk_norm else None
    for kv_format in kv_formats:
        problem = bench.target.kernel_device.problem(
            "rope_store", n=head_dim, k=num_heads // num_kv_heads, scheme=kv_format
        )
        kernel = select(problem)
        reference = KERNELS["rope_store"].get("reference")
        for m in bench.rows:
            facts: dict[str, Any] = {
                "num_heads": num_heads,
                "qk_norm": qk_norm,
                "eps": bench.arch.norm_eps,
                "leading_dim": layer.leading_dim,
            }
            slots_T = positions_T[:m] + block_size
            shape = (num_kv_heads, -(-m // block_size) + 1, block_size, head_dim)
            expected_kv = empty_pages(kv_format, shape, bench.device)
            expected_q = reference.fn(
                qkv_TF[:m], cos_PC, sin_PC, positions_T[:m], slots_T, expected_kv, **facts
            )
            for tool, each in _beside(kernel, reference):
                kv = empty_pages(kv_format, shape, bench.device)
                call = partial(each.fn, qkv_TF[:m], cos_PC, sin_PC, positions_T[:m], slots_T, kv, **facts)
                yield Case(
                    tool=tool,
                    op="rope_store",
                    name="rope_store",
                    scheme=kv_format,
                    m=m,
                    kernel=each.name,
                    num_bytes=m
                    * (
                        (2 * num_heads + 2 * num_kv_heads) * head_dim * bench.dtype.itemsize
                        + bytes_per_position(kv)
                    ),
                    flops=0,
                    launches=walk([call], at_least=launches_of(bench, m)),
                    error=partial(_stored_error, kv=kv, expected_q=expected_q, expected_kv=expected_kv),
                    limit=bench.rounding(head_dim),
                    phase="decode" if m <= DECODE_ROWS else "prefill",
                    shape=(num_heads, num_kv_heads, head_dim),
                )


def sample_cases(bench: Bench, batch_sizes: Sequence[int]) -> Iterator[Case]:
    """The end of a step; `error` is the share of rows with another token than argmax, where that is
    the law."""
    params = {
        "greedy": SamplingParams(1),
        "drawn": SamplingParams(1, temperature=0.8),
        "top-p": SamplingParams(1, 0.8, top_p=0.9),
    }
    vocab_size = bench.arch.vocab_size
    for m in batch_sizes:
        logits_RV = torch.randn(m, vocab_size, generator=bench.generator(), device=bench.device)
        best_R = logits_RV.argmax(dim=-1)
        positions_R = torch.arange(m, device=bench.device)
        calls: dict[tuple[str, str, str], Launch] = {
            ("torch", "greedy", "argmax"): partial(torch.argmax, logits_RV, dim=-1)
        }
        for name, each in params.items():
            rows = SamplingRows.of([each] * m, bench.device)
            plan = SamplingPlan.of([each] * m)
            calls["compress", name, "sample_rows"] = partial(_tokens, logits_RV, rows, positions_R, plan)
        for (tool, name, kernel), call in calls.items():
            yield Case(
                tool=tool,
                op="sample",
                name=name,
                scheme="F32",
                m=m,
                kernel=kernel,
                num_bytes=m * vocab_size * 4,
                flops=0,
                launches=walk([call], at_least=MIN_LAUNCHES),
                error=partial(_share_of_others, best_R=best_R) if name == "greedy" else None,
                limit=0.0,
                shape=(vocab_size,),
            )


def _tokens(logits_RV: Tensor, rows: SamplingRows, positions_R: Tensor, plan: SamplingPlan) -> Tensor:
    return sample_rows(logits_RV, rows, positions_R, plan).tokens_R


def _share_of_others(tokens_R: Tensor, *, best_R: Tensor) -> float:
    return float((tokens_R != best_R).to(torch.float32).mean())


def _dense_f64(rows: Tensor | QuantizedRows) -> Tensor:
    return rows.dequantize(torch.float64) if isinstance(rows, QuantizedRows) else rows.to(torch.float64)


def _row_error(rows: Tensor | QuantizedRows, *, expected: Tensor) -> float:
    return relative_error(_dense_f64(rows), expected)


def _stored_error(q_THC: Tensor, *, kv: PagedKV, expected_q: Tensor, expected_kv: PagedKV) -> float:
    """The worst of queries, keys and values; all pages are compared, so that a stray write is seen."""
    blocks = torch.arange(kv.k.shape[1], device=kv.k.device)
    pages = (each.gather(blocks, len(blocks) * kv.block_size, torch.float64) for each in (kv, expected_kv))
    pairs = [(q_THC, expected_q), *zip(*pages, strict=True)]
    return max(relative_error(actual, expected) for actual, expected in pairs)
