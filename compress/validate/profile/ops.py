"""Kinds of ops, by the names of kernels; on a CPU by those of torch's ops."""

from typing import Literal

OpKind = Literal["products", "attention", "rows", "routing", "sampling", "copies", "other"]

_NAMES: tuple[tuple[OpKind, tuple[str, ...]], ...] = (
    ("attention", ("attend", "attention", "merge_chunks", "widen_pages", "flash")),
    (
        "rows",
        ("norm", "rope", "hadamard", "act_mul", "quantize_rows", "prepare_rows", "soft_cap", "silu", "gelu"),
    ),
    ("routing", ("route_rows", "sort_pairs", "choose_rows", "combine")),
    (
        "products",
        (
            *("linear", "sliced_product", "gate_up", "down", "dequantize"),
            *("nvjet", "gemm", "gemv", "cutlass", "splitk", "scaled_mm", "aten::mm", "aten::bmm", "addmm"),
        ),
    ),
    ("sampling", ("_best", "_merge", "_filter", "_begin", "_end", "_place", "argmax", "softmax")),
    ("copies", ("memcpy", "memset", "copy", "index", "gather", "scatter", "aten::cat", "fill", "pad")),
)
"""Parts of names, in lower case, of each kind; the first that is found decides."""


def kind_of(kernel: str) -> OpKind:
    """Return the kind of op that a kernel belongs to. Products are those of linears and of experts; rows are
    norms, ropes, activations and rounding to codes, a row at a time."""
    name = kernel.lower()
    return next((kind for kind, parts in _NAMES if any(part in name for part in parts)), "other")
