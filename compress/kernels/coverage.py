"""Which kernel serves what on a device: every op, for the shapes of one model, each scheme and KV format, decode and prefill.

The answer is `select`'s own, asked with the problems that a loader would pose, so that it can be had without weights: by a person who wants
to know what a machine runs (`compress doctor`), and by a benchmark that must time what is served.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from compress.kernels.build.triton import compute_capability
from compress.kernels.operands.paged import FP8_STATIC, TOKEN_HEAD_FORMATS
from compress.kernels.select import DENSE_SCHEMES, Op, Problem, candidates
from compress.models.arch import LINEAR_GROUPS, Arch
from compress.quant.scheme import SCHEMES

Phase = Literal["decode", "prefill"]
PHASES: tuple[Phase, ...] = get_args(Phase)
LINEARS = (*LINEAR_GROUPS, "head")
"""The products of a model by name: its linear groups and the head."""


@dataclass(frozen=True)
class Machine:
    """Where kernels run, and how many rows at most. `sm` is the compute capability times ten, 0 without a GPU."""

    device: str
    sm: int
    dtype: torch.dtype
    decode_rows: int = 128
    prefill_rows: int = 2048

    @property
    def dense(self) -> str:
        """Name of a dense weight's scheme and of an unquantized cache."""
        return DENSE_SCHEMES[self.dtype]

    @staticmethod
    def of(device: torch.device, dtype: torch.dtype, **rows: int) -> "Machine":
        return Machine(device.type, compute_capability(device), dtype, **rows)

    def problem(
        self,
        op: Op,
        *,
        n: int,
        k: int = 0,
        phase: Phase = "decode",
        scheme: str | None = None,
        activation: str | None = None,
    ) -> Problem:
        """`scheme` None: dense."""
        return Problem(
            op=op,
            n=n,
            k=k,
            m_min=1,
            m_max=self.decode_rows if phase == "decode" else self.prefill_rows,
            row_invariant=phase == "decode",
            scheme=scheme if scheme is not None else self.dense,
            dtype=self.dtype,
            device=self.device,
            sm=self.sm,
            activation=activation,
        )


@dataclass(frozen=True)
class Served:
    """One problem and who serves it; `refused` has the faster candidates. `kernel` is None when nobody does, and all refused then."""

    name: str
    phase: Phase
    problem: Problem
    kernel: str | None
    refused: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "op": problem.op,
            "linear": self.name,
            "scheme": problem.scheme,
            "n": problem.n,
            "k": problem.k,
            "m_range": [problem.m_min, problem.m_max],
            "phase": self.phase,
            "activation": problem.activation,
            "kernel": self.kernel,
            "refused": self.refused,
        }


def linear_shape(arch: Arch, name: str, *, layer_idx: int = 0) -> tuple[int, int]:
    """Return [O, I] of a product of `LINEARS`."""
    if name == "head":
        return arch.vocab_size, arch.hidden_size
    return arch.layers[layer_idx].group_shape(LINEAR_GROUPS[name], arch.hidden_size)


def linear_problems(arch: Arch, machine: Machine, name: str, *, scheme: str, phase: Phase) -> list[Problem]:
    """The problems of a fused linear in the order in which they are tried: decode asks gate_up to apply the activation too."""
    n, k = linear_shape(arch, name)
    activations = (arch.activation, None) if name == "gate_up" and phase == "decode" else (None,)
    return [
        machine.problem("linear", n=n, k=k, phase=phase, scheme=scheme, activation=each)
        for each in activations
    ]


def coverage(arch: Arch, machine: Machine) -> list[Served]:
    """Every op of a model of this shape."""
    schemes = (machine.dense, *SCHEMES)
    rows = [
        _served(name, phase, linear_problems(arch, machine, name, scheme=scheme, phase=phase))
        for scheme in schemes
        for name in LINEARS
        for phase in PHASES
    ]
    layer = arch.layers[0]
    repeat = layer.num_heads // layer.num_kv_heads
    cached: tuple[tuple[Op, Phase], ...] = (
        ("rope_store", "decode"),
        ("attention_decode", "decode"),
        ("attention_prefill", "prefill"),
    )
    for op, phase in cached:
        for kv_format in (machine.dense, *TOKEN_HEAD_FORMATS, FP8_STATIC):
            rows.append(
                _served(
                    op,
                    phase,
                    [machine.problem(op, n=layer.head_dim, k=repeat, phase=phase, scheme=kv_format)],
                )
            )
    row_wise: tuple[tuple[Op, int], ...] = (
        ("rms_norm", arch.hidden_size),
        ("act_mul", layer.intermediate_size),
        ("quantize_rows", arch.hidden_size),
    )
    return rows + [_served(op, "decode", [machine.problem(op, n=size)]) for op, size in row_wise]


def _served(name: str, phase: Phase, problems: Sequence[Problem]) -> Served:
    """The first problem that somebody serves, by the kernel that `select` would take."""
    for problem in problems:
        refused: dict[str, str] = {}
        for kernel in candidates(problem.op):
            reason = kernel.refusal(problem)
            if reason is None:
                faster = {other.name for other in candidates(problem.op) if other.rank > kernel.rank}
                return Served(
                    name,
                    phase,
                    problem,
                    kernel.name,
                    {other: why for other, why in refused.items() if other in faster},
                )
            refused[kernel.name] = reason
    return Served(name, phase, problems[-1], None, refused)


def unused(rows: Sequence[Served]) -> list[dict[str, str]]:
    """{op, kernel, reason} of the kernels above the reference that serve none of these rows."""
    idle: list[dict[str, str]] = []
    for op in dict.fromkeys(row.problem.op for row in rows):
        problems = [row.problem for row in rows if row.problem.op == op]
        serving = {row.kernel for row in rows if row.problem.op == op}
        for kernel in candidates(op):
            if kernel.rank > 0 and kernel.name not in serving:
                reasons = dict.fromkeys(kernel.refusal(problem) for problem in problems)
                said = "; ".join(each for each in reasons if each is not None)
                idle.append(
                    {
                        "op": op,
                        "kernel": kernel.name,
                        "reason": said if None not in reasons else "a faster one serves all it could",
                    }
                )
    return idle
