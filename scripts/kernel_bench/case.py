"""What a case of the kernel benchmark is, and how far a result may be from its reference.

`error` is ||out - reference|| / ||reference||; the reference is float64 for linears and attention, the
reference kernel for row-wise ops.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.paged import PagedKV
from compress.kernels.problem import DENSE_SCHEMES, Phase
from compress.models.arch import Arch
from compress.runtime.deployment import Deployment
from scripts.kernel_bench.timer import Launch

DECODE_ROWS = 128
MIN_LAUNCHES = 16
"""Launches of a graph, so that what surrounds a graph weighs little; a row-wise op of a microsecond wants
`MANY_LAUNCHES`."""
MANY_LAUNCHES = 128


@dataclass(frozen=True)
class Bench:
    """What all cases share. `rows` are the sizes M of linears and row-wise ops."""

    arch: Arch
    device: torch.device
    dtype: torch.dtype
    rows: tuple[int, ...]
    seed: int = 0

    @property
    def dense(self) -> str:
        return DENSE_SCHEMES[self.dtype]

    @property
    def target(self) -> Deployment:
        most = max(DECODE_ROWS + 1, *self.rows)
        return Deployment(self.device, self.dtype, max_batch_size=DECODE_ROWS, max_step_tokens=most)

    def generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator(), device=self.device).to(self.dtype)

    def rounding(self, depth: int) -> float:
        """A bound for relative errors: roundings to the dtype, and a sum of `depth` float32 terms."""
        return torch.finfo(self.dtype).eps + 4 * torch.finfo(torch.float32).eps * math.sqrt(depth)


@dataclass(frozen=True)
class Case:
    """One timed thing. `tool` is "compress" or "torch"; `m` counts rows (requests, where each brings one).
    `limit` bounds the error; an `error` of None is not checked. Work that copies from the host cannot be
    `in_graph`."""

    tool: str
    op: str
    name: str
    scheme: str
    m: int
    kernel: str
    num_bytes: int
    flops: int
    launches: Sequence[Launch]
    error: Callable[[Any], float] | None
    limit: float
    phase: Phase = "decode"
    shape: tuple[int, ...] = ()
    in_graph: bool = True


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """NaN and infinities count as infinite."""
    difference = torch.linalg.vector_norm(actual.to(torch.float64) - expected.to(torch.float64))
    error = float(difference / torch.linalg.vector_norm(expected.to(torch.float64)))
    return error if math.isfinite(error) else math.inf


def clone_pages(kv: PagedKV) -> PagedKV:
    return replace(
        kv, **{name: value.clone() for name, value in vars(kv).items() if isinstance(value, Tensor)}
    )


def bytes_per_position(kv: PagedKV) -> int:
    """Keys, values and their scales, all heads."""
    scales = 0 if kv.k_scale is None else 2 * kv.k_scale.element_size() * kv.k.shape[0]
    return 2 * kv.k.shape[0] * kv.k.shape[3] * kv.k.element_size() + scales


def launches_of(bench: Bench, m: int) -> int:
    """Launches in a graph of row-wise ops."""
    return 1 if bench.device.type == "cpu" else MANY_LAUNCHES if m <= DECODE_ROWS else MIN_LAUNCHES
