"""How a weight format registers its decode linears: one kernel for each activation of a gated linear, and the
plain one."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.kernels.linear.launch import ACTIVATIONS, KernelWeight
from compress.kernels.linear.shape import TILE_ROWS
from compress.kernels.operands.rows import QuantizedRows, RawRows
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, Repack

MAX_ROWS = 512
MIN_SM = 80


class Packed(Protocol):
    """A weight in the layout that the decode kernels read; `dtype` is the model's."""

    @property
    def kernel_weight(self) -> KernelWeight: ...

    @property
    def dtype(self) -> torch.dtype: ...


def for_packed(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a linear of `Packed` weights, computed by `stream`, `multiply` or another product of a
    `KernelWeight`."""

    def linear(
        x: Tensor | QuantizedRows | RawRows,
        packed: Packed,
        bias_O: Tensor | None,
        *,
        activation: str | None,
        residual_TO: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        return product(
            x,
            packed.kernel_weight,
            bias_O,
            dtype=packed.dtype,
            activation=activation,
            residual_TO=residual_TO,
            out_dtype=out_dtype,
        )

    return linear


def refuse_partial_tile(problem: Problem) -> str | None:
    """Refuse N that fills no whole tiles; for formats that keep rows as they are, and so cannot pad them."""
    multiple = TILE_ROWS if problem.activation is None else 2 * 8
    return f"N = {problem.n} is no multiple of {multiple}" if problem.n % multiple else None


def decode_kernels(
    name: str,
    *,
    schemes: tuple[str, ...],
    fn: Callable[..., Tensor],
    repack: Repack,
    refusal: Callable[[Problem], str | None],
    min_sm: int = MIN_SM,
    priority: int = 20,
    prepares: bool = True,
) -> Iterator[Kernel]:
    """Yield the kernels of a format, one for each activation; `refusal` adds what only this format refuses,
    and those that `prepares` take raw rows."""
    for activation in ACTIVATIONS:

        def supports(problem: Problem, activation: str | None = activation) -> str | None:
            if problem.scheme not in schemes:
                return f"for {', '.join(schemes)}"
            if problem.activation != activation:
                return f"its outputs are gated by {activation}" if activation else "its outputs are not gated"
            if problem.dtype not in (torch.bfloat16, torch.float16):
                return "computes in bfloat16 or float16"
            if not problem.row_invariant:
                return "for decode rows; a prompt's few rows take it from there"
            if problem.m_max > MAX_ROWS:
                return f"for M up to {MAX_ROWS}, where weight bytes are the bound"
            if problem.k % 128:
                return f"K = {problem.k} is no multiple of 128"
            return refusal(problem)

        bound: Callable[..., Any] = functools.partial(fn, activation=activation)
        suffix = f".{activation}" if activation else ""
        yield Kernel(
            "linear",
            f"{name}{suffix}",
            min_sm=min_sm,
            priority=priority,
            supports=supports,
            fn=bound,
            repack=repack,
            prepares=prepares,
        )
