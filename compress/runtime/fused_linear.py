"""The linears of one linear group as one product, with the kernels chosen for them.

q, k and v read the same input, and so do gate and up: stacked along the outputs they are one product instead
of three or two. Linears of different schemes cannot share a kernel, so a fused linear is a row of slices,
each a run of linears with one scheme: one slice, unless precision is mixed within the group. Every slice has
a kernel for decode rows, whose results must not depend on the other rows of a call, and one for prefill rows.
Both read one copy of the weights where they agree on its layout.

A decode kernel may apply the gate itself (`FusedLinear.applies_gate`), and may normalize and quantize its own
input (`FusedLinear.prepares_input`).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from compress.kernels.operands.rows import ActivationQuant, QuantizedRows, RawRows, RowNorm
from compress.kernels.problem import Phase, Problem
from compress.kernels.select import Kernel, candidates, select

Rows = Tensor | QuantizedRows | RawRows


@dataclass(frozen=True)
class BoundKernel:
    """A kernel with the problem it was selected for and, for a linear, the weights in its layout."""

    kernel: Kernel
    problem: Problem
    packed: Any = None

    @staticmethod
    def of(problem: Problem) -> "BoundKernel":
        """Select the kernel that serves a problem, of an op without weights to pack.

        Raises:
            EnvironmentUnfit: no kernel serves it.
        """
        return BoundKernel(select(problem), problem)

    def report(self, *, layer: int | None, linear: str) -> dict[str, Any]:
        """Return one row of `Engine.kernel_report`."""
        problem = self.problem
        faster = [each for each in candidates(problem.op) if each.priority > self.kernel.priority]
        return {
            "layer": layer,
            "linear": linear,
            "op": problem.op,
            "scheme": problem.scheme,
            "n": problem.n,
            "k": problem.k,
            "m_range": [problem.m_min, problem.m_max],
            "phase": "decode" if problem.row_invariant else "prefill",
            "kernel": self.kernel.name,
            "refused": {each.name: each.refusal(problem) for each in faster},
        }


@dataclass(frozen=True)
class SchemeSlice:
    """The neighbouring linears of a group that share one scheme, stacked along O.

    `quant` is how their input is quantized, None if it is not; `quantize` is the op that does it.
    """

    linears: tuple[str, ...]
    decode: BoundKernel
    prefill: BoundKernel
    bias_O: Tensor | None
    quant: ActivationQuant | None
    quantize: Callable[[Tensor, ActivationQuant], QuantizedRows]

    def __call__(self, x: Rows, phase: Phase, **epilogue: Any) -> Tensor:
        bound = self.decode if phase == "decode" else self.prefill
        if self.quant is not None and isinstance(x, Tensor):
            x = RawRows(x, quant=self.quant) if bound.kernel.prepares else self.quantize(x, self.quant)
        return bound.kernel.fn(x, bound.packed, self.bias_O, **epilogue)


@dataclass(frozen=True)
class FusedLinear:
    """A linear group as one product. The outputs of its slices follow one another along O, and are multiplied
    by `factor`."""

    slices: tuple[SchemeSlice, ...]
    factor: float = 1.0

    def __call__(
        self, x: Rows, phase: Phase, *, residual: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return [T, O], or [T, O / 2] where the kernel applies the gate, plus `residual` if given."""
        if self.factor != 1:
            plain = FusedLinear(self.slices)(x, phase, out_dtype=out_dtype)
            if residual is None or not plain.is_cuda:  # where PyTorch rounds an alpha to the dtype
                y = plain * self.factor
                return y if residual is None else residual + y
            return residual.add(plain, alpha=self.factor)
        if len(self.slices) == 1:
            return self.slices[0](x, phase, residual_TO=residual, out_dtype=out_dtype)
        y = torch.cat([each(x, phase, out_dtype=out_dtype) for each in self.slices], dim=-1)
        return y if residual is None else residual + y

    @property
    def quant(self) -> ActivationQuant | None:
        """How the op that writes the input may quantize it, which it does for a single slice only; None if
        each slice quantizes its input itself, as with blocks whose scales are one byte."""
        quant = self.slices[0].quant if len(self.slices) == 1 else None
        return None if quant is None or quant.scale_type is not None else quant

    def prepares_input(self, phase: Phase, norm: RowNorm) -> bool:
        """Return whether the kernel normalizes its input by this norm, and quantizes it, itself."""
        bound = self.slices[0].decode if phase == "decode" else self.slices[0].prefill
        plain = not norm.centered and norm.weight.dtype == bound.problem.dtype
        return plain and len(self.slices) == 1 and bound.kernel.prepares

    def applies_gate(self, phase: Phase) -> bool:
        """Return whether the kernel computes activation(gate) * up, and not gate and up."""
        bound = self.slices[0].decode if phase == "decode" else self.slices[0].prefill
        return bound.problem.activation is not None

    @property
    def weight_bytes(self) -> int:
        """Bytes that one decode step reads of these weights."""
        return sum(packed_bytes(each.decode.packed) for each in self.slices)

    def report(self, layer: int | None) -> list[dict[str, Any]]:
        """Return rows of `Engine.kernel_report`, one for each slice and phase."""
        bound = [(part, each) for part in self.slices for each in (part.decode, part.prefill)]
        return [each.report(layer=layer, linear="+".join(part.linears)) for part, each in bound]


def packed_bytes(packed: Any) -> int:
    """Return the bytes of all tensors in a packed weight."""
    if isinstance(packed, Tensor):
        return packed.numel() * packed.element_size()
    if is_dataclass(packed):
        return sum(packed_bytes(getattr(packed, each.name)) for each in fields(packed))
    return sum(packed_bytes(each) for each in packed) if isinstance(packed, tuple) else 0
