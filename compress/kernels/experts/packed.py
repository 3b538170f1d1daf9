"""The experts of a layer as the grouped kernels read them: one tensor for all gates and ups (F of gate, then
F of up; of up alone without gates), one for all downs, in a format of `operands/matrices.py`.

Where the products of a format read 16-bit rows and the scheme rounds inputs, rows are rounded first, and are
16-bit numbers again.

Shapes: D hidden, F ffn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compress.kernels.operands.matrices import (
    TILE,
    Matrices,
    MatrixFormat,
    format_of,
    format_of_weights,
    pack_matrices,
    refuse_powers,
)
from compress.kernels.operands.routing import ExpertWeights, expert_inputs
from compress.kernels.operands.rows import ActivationQuant
from compress.kernels.problem import DENSE_SCHEMES, Problem
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme

MIN_COLUMNS = 16
DECODED_IN_SLICES: tuple[MatrixFormat, ...] = ("w4", "int8", "w8", "fp4")
"""Formats of which `slices.py` serves decode rows."""
RESIDENT: tuple[MatrixFormat, ...] = ("dense16", "fp8", "fp8_block")
"""Formats of which `resident.py` serves decode rows on Hopper where they are few; `fused.py` serves the
others."""
MOST_UNITS = 1024
"""Units of a launch of `resident.py`: 128 rows of 8 choices among 128 experts have up to 256."""
MOST_PAIRS = 32
"""Pairs of `resident.py` that are units of their own, at most: of more, experts are hit twice too often."""


@dataclass(frozen=True)
class PackedExperts:
    """All experts of a layer. `arrivals` are zeroed counters [D / 16] that a kernel leaves zeroed, `state` is
    what launches of `resident.cu` share; `dtype` is the model's."""

    gate_up: Matrices
    down: Matrices
    num_experts: int
    dtype: torch.dtype
    arrivals: Tensor
    state: Tensor
    gate_up_input: ActivationQuant | None
    down_input: ActivationQuant | None

    @property
    def format(self) -> MatrixFormat:
        return self.down.format

    @property
    def gated(self) -> bool:
        """Whether `gate_up` holds gates."""
        return self.gate_up.out_features > self.down.in_features

    @property
    def bytes_per_expert(self) -> int:
        """Bytes of weights and scales that one expert reads."""
        tensors = [
            each
            for matrices in (self.gate_up, self.down)
            for each in (matrices.data, matrices.scale, matrices.offset, matrices.outer, matrices.bias_EO)
        ]
        total = sum(each.numel() * each.element_size() for each in tensors if each is not None)
        return total // self.num_experts


def repack(experts: Sequence[ExpertWeights], *, dtype: torch.dtype, device: torch.device) -> PackedExperts:
    """Repack the experts of a layer, whose weights all have the format of the first one's scheme."""
    downs = [(each.down,) for each in experts]
    down_bias = [(each.down_bias,) for each in experts]
    hidden_size = experts[0].down.shape[0]
    up = experts[0].up
    form = format_of_weights(up.scheme if isinstance(up, QuantizedWeight) else None)
    pack = partial(pack_matrices, dtype=dtype, device=device, format=form)
    return PackedExperts(
        pack([each.gate_up for each in experts], [each.gate_up_bias for each in experts]),
        pack(downs, down_bias),
        len(experts),
        dtype,
        torch.zeros(-(-hidden_size // TILE), dtype=torch.int32, device=device),
        torch.zeros(state_size(experts[0].down.shape[1]), dtype=torch.int32, device=device),
        *expert_inputs(experts, device),
    )


def state_size(ffn: int) -> int:
    """Return the numbers of `state`: the next range, the number of the launch, and from the fifth on two
    counters for each unit, and h of the rows whose pairs are units, each two numbers with the number of a
    launch."""
    return 4 + 2 * MOST_UNITS + MOST_PAIRS * ffn


def format_of_problem(problem: Problem) -> MatrixFormat | None:
    """Return the format of a problem's weights, None where there is none. Gates and downs of two schemes have
    one where they are codes of one format by 16-bit rows."""
    if problem.scheme == DENSE_SCHEMES[problem.dtype]:
        return "dense16"
    schemes = schemes_of(problem)
    formats = {format_of_weights(each) for each in schemes}
    takes_all = len(schemes) == 1 or all(each.activation is None for each in schemes)
    return formats.pop() if takes_all and len(formats) == 1 else None


def schemes_of(problem: Problem) -> list[Scheme]:
    """Return the scheme of a problem's codes, or those of gate and of down where they differ; none where one
    of them is not known."""
    names = problem.scheme.split("+")
    return [SCHEMES[name] for name in names] if SCHEMES.keys() >= {*names} else []


def rounds_apart(problem: Problem) -> bool:
    """Return whether rows are rounded otherwise than for the codes of a format, and so by themselves."""
    return any(format_of(each) is None for each in schemes_of(problem))


def refusal(problem: Problem) -> str | None:
    """Refuse what no kernel of packed experts serves."""
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in 16 bits, not in {problem.dtype}"
    if format_of_problem(problem) is None:
        return f"no format holds {problem.scheme}"
    schemes = schemes_of(problem)
    for scheme in schemes:
        if reason := refuse_powers(scheme, problem.dtype):
            return reason
    for name, size in (("D", problem.n), ("F", problem.k)):
        if size % MIN_COLUMNS:
            return f"{name} = {size} is no multiple of {MIN_COLUMNS}"
        for scheme in schemes:
            if scheme.group_size is not None and size % scheme.group_size:
                return f"{name} = {size} is no multiple of the group size {scheme.group_size}"
    return None


assert TILE <= MIN_COLUMNS
