"""Which kernel computes an op: every candidate says whether it can serve a problem, and if not, why.

An op is a package of this one; a kernel is one file in it that adds itself to `KERNELS[op]`. `select` takes the candidate of the highest
rank that refuses nothing. Nothing falls back silently: refusals are kept and shown (`refusals`, `Engine.kernel_report`).

The signature of `fn`, by op (T rows, O out, I in, H heads, K kv heads, C head dimension, R requests, L context, P slots of the cache):

    linear             fn(x_TI, packed, bias_O | None) -> y_TO             packed = repack(weights stacked along O, dtype, device)
    rms_norm           fn(x, weight, eps) -> like x                        over the last axis; `weight` broadcasts against x
    rope               fn(x_THC, cos_TC, sin_TC) -> like x
    act_mul            fn(gate_up_TF, activation) -> [T, F / 2]            activation(first half) * second half
    attention_decode   fn(q_RHC, k_cache, v_cache, block_table_RB, context_lens_R, window, scale) -> [R, H, C]; caches [K, blocks, size, C]
    attention_prefill  fn(q_THC, k_KLC, v_KLC, window, scale) -> [T, H, C] one sequence; the queries are its last T positions
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from compress.errors import EnvironmentUnfit
from compress.plugins import PluginSet
from compress.quant.scheme import QuantizedWeight

Op = Literal["linear", "rms_norm", "rope", "act_mul", "attention_decode", "attention_prefill"]
DENSE_SCHEMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""What a dense weight is called where a quantized one has its scheme's name."""
OPS: tuple[Op, ...] = ("linear", "rms_norm", "rope", "act_mul", "attention_decode", "attention_prefill")


@dataclass(frozen=True)
class Problem:
    """What a kernel is asked to do. `n` and `k` are a linear's O and I (for other ops: the row size, and 0).

    `row_invariant` asks that the bits of a row depend on nothing but that row: not on M, not on its neighbours, not on its place among
    them. Decode rows are always asked so. `scheme` names the quantization scheme, or the dtype of a dense weight (`BF16`, `F32`).
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


class Repack(Protocol):
    def __call__(
        self, weights: Sequence[Tensor | QuantizedWeight], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor | tuple[Tensor, ...]: ...


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op. `supports` gives None, or the reason of refusal as a sentence.

    `repack` turns canonical weights into the layout `fn` reads, once, at load; kernels with the same `repack` share its result. `min_sm`
    is the least compute capability times ten (90 for Hopper), 0 for kernels that run anywhere. Of those that refuse nothing, the
    highest `rank` wins.
    """

    op: Op
    name: str
    min_sm: int
    rank: int
    supports: Callable[[Problem], str | None]
    fn: Callable[..., Tensor]
    repack: Repack | None = None

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
    return sorted((kernel for _, kernel in KERNELS[op].items()), key=lambda kernel: (-kernel.rank, kernel.name))


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
