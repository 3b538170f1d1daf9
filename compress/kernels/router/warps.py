"""The router of decode rows in one launch: `warps.cu`, which documents its sums."""

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.compilers.nvrtc import Function, Launch, Source, source_text
from compress.kernels.operands.gpu import gpu_of
from compress.kernels.operands.routing import COUNTED_ROWS, RouterWeights, chosen_by_table
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register
from compress.models.expert_checks import SCORES
from compress.models.experts import Experts
from compress.models.moe import FLOORED, SUM_FLOOR

WARPS = 8
"""Slices of a row's columns, and rows, of a block."""
EXPERTS = 16
"""Experts of a block."""
CLUSTERS = (2, 4, 8)
"""Numbers of blocks that are one cluster on sm_90."""
MAX_DECODE_ROWS = WARPS * COUNTED_ROWS
MAX_CHOICES = 32
MAX_GROUPS = 32
MAX_EXPERTS = 1024
MAX_SIZE = 16384
"""Columns of a row."""
SOURCES = ("operands/numbers.cuh", "operands/products.cuh", "operands/global.cuh", "router/warps.cu")


@dataclass(frozen=True)
class Variant:
    """The constants that the kernel is compiled with."""

    dtype: torch.dtype
    vectors: int
    per_lane: int
    score: str
    renormalize: bool
    grouped: bool
    selection_bias: bool
    biased_logits: bool
    zeroes_groups: bool
    table: bool
    cluster: int

    @property
    def source(self) -> Source:
        macros = {
            "F16": int(self.dtype == torch.float16),
            "ACT": 0,
            "VECTORS": self.vectors,
            "PER_LANE": self.per_lane,
            "SCORE": SCORES.index(self.score),
            "RENORMALIZE": int(self.renormalize),
            "GROUPED": int(self.grouped),
            "SELECTION": int(self.selection_bias),
            "OF_LOGITS": int(self.biased_logits),
            "ZEROES": int(self.zeroes_groups),
            "TABLE": int(self.table),
            "CLUSTER": self.cluster,
        }
        return Source(source_text(*SOURCES), "route_rows", tuple(macros.items()))


class _Arguments(ctypes.Structure):
    """`Args` of warps.cu."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "x",
                "w",
                "bias",
                "selection_bias",
                "output_scale",
                "logits",
                "arrivals",
                "tokens",
                "table",
                "ids",
                "weights",
            )
        ),
        *(
            (name, ctypes.c_int)
            for name in (
                "size",
                "num_experts",
                "num_rows",
                "choices",
                "num_groups",
                "top_groups",
                "group_best",
                "shared",
            )
        ),
        *((name, ctypes.c_float) for name in ("logit_scale", "scale", "least", "gap")),
    ]


def variant_of(dtype: torch.dtype, size: int, facts: Experts, sm: int) -> Variant:
    """Return what the kernel is compiled for to serve a router of rows of `size` columns."""
    blocks = -(-facts.num_experts // EXPERTS)
    return Variant(
        dtype=dtype,
        vectors=-(-size // (32 * WARPS)),
        per_lane=-(-facts.num_experts // 32),
        score=facts.score,
        renormalize=facts.renormalize,
        grouped=facts.num_groups > 1,
        selection_bias=facts.selection_bias,
        biased_logits=facts.biased_logits,
        zeroes_groups=facts.zeroes_groups,
        table=bool(facts.table_size),
        cluster=blocks if sm >= 90 and blocks in CLUSTERS else 0,
    )


def route(
    x_TD: Tensor,
    router: RouterWeights,
    facts: Experts,
    *,
    shared: int = 0,
    tokens_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ids and weights, [T, K]; a row's bits depend on the row alone, and on its token where a table
    chooses experts."""
    num_rows, size = x_TD.shape
    device = x_TD.device
    assert router.weight_ED.shape == (facts.num_experts, size)
    assert (router.selection_bias_E is not None) == facts.selection_bias
    assert (router.output_scale_E is not None) == facts.scales_weights
    assert num_rows <= MAX_DECODE_ROWS
    tokens_T, table_VK = chosen_by_table(router, facts, num_rows, tokens_T)
    x_TD = x_TD.contiguous()
    ids_TK = torch.empty(num_rows, facts.top_k + shared, dtype=torch.int32, device=device)
    weights_TK = torch.empty(ids_TK.shape, dtype=torch.float32, device=device)
    if num_rows == 0:
        return ids_TK, weights_TK
    logits_TE = torch.empty(num_rows, facts.num_experts, dtype=torch.float32, device=device)
    tensors = (
        x_TD,
        router.weight_ED,
        router.bias_E,
        router.selection_bias_E,
        router.output_scale_E,
        logits_TE,
        router.arrivals,
        tokens_T,
        table_VK,
        ids_TK,
        weights_TK,
    )
    arguments = _Arguments(
        *(None if each is None else each.data_ptr() for each in tensors),
        size,
        facts.num_experts,
        num_rows,
        facts.top_k,
        facts.num_groups,
        facts.top_groups,
        facts.group_best,
        shared,
        facts.router_scale,
        facts.scale,
        SUM_FLOOR if facts.score in FLOORED else 0.0,
        facts.gap,
    )
    sm = gpu_of(device).sm
    variant = variant_of(x_TD.dtype, size, facts, sm)
    launch = Launch(
        grid=(-(-facts.num_experts // EXPERTS), -(-num_rows // WARPS)),
        threads=32 * WARPS,
        shared_bytes=0,
        cluster=max(variant.cluster, 1),
        overlap=sm >= 90,
    )
    _function(variant, device)(launch, arguments, device=device)
    return ids_TK, weights_TK


@functools.cache
def _function(variant: Variant, device: torch.device) -> Function:
    return Function(variant.source, device=device, shared_bytes=0, sm=gpu_of(device).sm)


def supports(problem: Problem) -> str | None:
    if not problem.row_invariant:
        return "for decode rows; a prompt's logits are one product"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in 16 bits, not in {problem.dtype}"
    if problem.m_max > MAX_DECODE_ROWS:
        return f"for M up to {MAX_DECODE_ROWS}"
    if problem.k % 8 or problem.k > MAX_SIZE:
        return f"K = {problem.k} is no multiple of 8 up to {MAX_SIZE}"
    for what, count, most in (
        ("experts", problem.experts, MAX_EXPERTS),
        ("choices", problem.top_k, MAX_CHOICES),
        ("groups of experts", problem.expert_groups, MAX_GROUPS),
    ):
        if count > most:
            return f"chooses by one warp, from at most {most} {what}, not {count}"
    return None


register(Kernel("router", "cuda.warps", min_sm=80, priority=20, supports=supports, fn=route))
