"""Which kernel computes an op: every candidate says whether it can serve a problem, and if not, why.

An op is a package of this one; a kernel is one file in it that adds itself to `KERNELS[op]`. `select` takes the candidate of the highest
rank that refuses nothing. Nothing falls back silently: refusals are kept and shown (`refusals`, `Engine.kernel_report`).

The signature of `fn`, by op (T rows, O out, I in, D hidden, F ffn, H heads, K kv heads, C head dimension, R requests, B blocks of a table,
P positions; "rows" is a tensor, or `QuantizedRows` where a `quant` asks for them):

    linear             fn(rows_TI, packed, bias_O | None, *, residual_TO=None, out_dtype=None) -> y_TO
                       packed = repack(weights stacked along O). A gated linear (`Problem.activation`) gives activation(first half) * second
                       half, [T, O / 2]. The sum with `residual` follows the rounding to the model's dtype.
    rms_norm           fn(x, weight, eps, quant=None) -> rows like x         over the last axis; `weight` broadcasts against x
    act_mul            fn(gate_up_TF, activation, quant=None) -> rows [T, F / 2]
    quantize_rows      fn(x_TI, quant) -> QuantizedRows
    rope_store         fn(qkv_TF, cos_PC, sin_PC, positions_T, slots_T, kv, *, num_heads, qk_norm, eps) -> q_THC; writes k, v to kv
    attention_decode   fn(q_THC, kv, block_table_RB, context_lens_R, *, q_len, window, scale) -> [T, H, C]; T = R q_len, the last q_len
                       positions of each context
    attention_prefill  fn(q_THC, kv, block_table_RB, query_lens, context_lens, *, window, scale) -> [T, H, C]; ragged; lengths as tuples
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from compress.errors import EnvironmentUnfit
from compress.plugins import PluginSet
from compress.quant.scheme import QuantizedWeight

Op = Literal[
    "linear", "rms_norm", "act_mul", "quantize_rows", "rope_store", "attention_decode", "attention_prefill"
]
DENSE_SCHEMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""What a dense weight is called where a quantized one has its scheme's name."""
OPS: tuple[Op, ...] = get_args(Op)


@dataclass(frozen=True)
class Problem:
    """What a kernel is asked to do. `n` and `k` are a linear's O and I; for attention and rope_store the head dimension and the query
    heads per KV head; for other ops the row size, and 0.

    `row_invariant` asks that the bits of a row depend on nothing but that row: not on M, not on its neighbours, not on its place among
    them. Decode rows are always asked so. `scheme` names the quantization scheme, or the dtype of a dense weight (`BF16`, `F32`); for
    attention and rope_store the format of the KV cache. `activation` makes a linear gated.
    """

    op: Op
    n: int
    k: int
    m_min: int
    m_max: int
    row_invariant: bool
    scheme: str
    dtype: torch.dtype
    device: str
    sm: int
    activation: str | None = None


class Repack(Protocol):
    """Weights [O_j, I] to be stacked along O, gate before up when `gated`."""

    def __call__(
        self,
        weights: Sequence[Tensor | QuantizedWeight],
        *,
        dtype: torch.dtype,
        device: torch.device,
        gated: bool,
    ) -> Any: ...


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op. `supports` gives None, or the reason of refusal as a sentence.

    `repack` turns canonical weights into the layout `fn` reads (tensors or a frozen dataclass of tensors), once, at load; kernels with
    the same `repack` share its result. `min_sm`
    is the least compute capability times ten (90 for Hopper), 0 for kernels that run anywhere. Of those that refuse nothing, the
    highest `rank` wins. A linear that `prepares` also takes `RawRows`.
    """

    op: Op
    name: str
    min_sm: int
    rank: int
    supports: Callable[[Problem], str | None]
    fn: Callable[..., Any]
    repack: Repack | None = None
    prepares: bool = False

    def refusal(self, problem: Problem) -> str | None:
        if self.min_sm > problem.sm:
            where = f"sm_{problem.sm}" if problem.sm else problem.device
            return f"needs sm_{self.min_sm} or newer and this device is {where}"
        return self.supports(problem)


KERNELS: dict[Op, PluginSet[Kernel]] = {op: PluginSet(f"{op} kernel", f"compress.kernels.{op}") for op in OPS}


def register(kernel: Kernel) -> Kernel:
    """Add a kernel to its op's set; called at the end of a kernel's file."""
    KERNELS[kernel.op].add(kernel.name, kernel)
    return kernel


def anything(problem: Problem) -> str | None:
    """`supports` of a kernel that refuses nothing."""
    return None


def candidates(op: Op) -> list[Kernel]:
    """Highest rank first."""
    return sorted(
        (kernel for _, kernel in KERNELS[op].items()), key=lambda kernel: (-kernel.rank, kernel.name)
    )


def select(problem: Problem) -> Kernel:
    """The kernel for a problem.

    Raises:
        EnvironmentUnfit: no candidate supports it; the message says why each refused.
    """
    for kernel in candidates(problem.op):
        if kernel.refusal(problem) is None:
            return kernel
    why = "; ".join(f"{name}: {reason}" for name, reason in refusals(problem).items())
    raise EnvironmentUnfit(
        f"no {problem.op} kernel for scheme {problem.scheme}, N = {problem.n}, K = {problem.k}, M = {problem.m_min}..{problem.m_max} "
        f"on {problem.device}: {why}."
    )


def refusals(problem: Problem) -> dict[str, str]:
    """Candidate -> why it refuses, for those that do."""
    reasons = {kernel.name: kernel.refusal(problem) for kernel in candidates(problem.op)}
    return {name: reason for name, reason in reasons.items() if reason is not None}
