"""Reference W8A8 linear of int8 weights and int8 rows, exact in int32, and the layout of its weight, which
every kernel of int8 reads.

    y = (x_values W_codes^T) x_scale w_scale      the product exact in int32, scaled in float32, rounded once
    y = (x_values W_codes^T - x_zero w_sum) x_scale w_scale       asymmetric rows; w_sum: an output's codes

The correction is a whole number, subtracted before anything is rounded, so asymmetric rows lose nothing to
it. Static and dynamic scales of rows differ in nothing here: rows bring theirs.

Integer sums have no order, so a row's bits depend on the row alone, whatever a library does with M: one
kernel serves decode and prefill, and without a bias every kernel of int8 gives its bits. Codes stay int8 in
memory.

On a CPU without an instruction for it (VNNI; AMD has it from Zen 4 on) PyTorch's integer product is wrong:
it adds pairs of products in 16 bits, which saturate. There the product is one of float32 numbers, 1,024
columns at a time, whose sums stay below 2^24 and are exact.

On CUDA the library needs more than 16 rows, and N and K in multiples of 8: rows and weights are padded
with zeros, which add nothing.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.linear.coded import coded, finished, stacked_codes, stacked_scales
from compress.kernels.linear.launch import KernelWeight
from compress.kernels.operands.rows import INT8, QuantizedRows
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register
from compress.quant.scheme import QuantizedWeight

SYMMETRIC = ("INT8_DYNAMIC", "INT8_STATIC")
ASYMMETRIC = ("INT8_DYNAMIC_ASYM", "INT8_STATIC_ASYM")
"""Schemes whose rows have zero points."""
SCHEMES = (*SYMMETRIC, *ASYMMETRIC)
MULTIPLE = 8
FEWEST_ROWS = 32
INT32_MAX = (1 << 31) - 1
EXACT_DEPTH = 1024
"""Products of two 8-bit codes whose sums float32 holds exactly."""
MAX_K = INT32_MAX // (127 * 128)
"""Products of 127 and -128 that an int32 sum holds."""
MAX_K_OF = {
    "INT8_DYNAMIC": MAX_K,
    "INT8_STATIC": INT32_MAX // (128 * 128),
    **dict.fromkeys(ASYMMETRIC, INT32_MAX // (255 * 128)),
}
"""Limits by scheme: static codes reach -128, and asymmetric ones, less their zero point, 255. A sum before
its correction may overflow; so does what is subtracted, and their difference is right."""


@dataclass(frozen=True)
class PackedInt8:
    """Codes int8 [O, I], padded to multiples of 8, and float32 scale [O], not padded; `dtype` is the
    model's. `sum_O` int32 has the sums of the codes of each output, not padded, for asymmetric rows alone."""

    codes_OI: Tensor
    scale_O: Tensor
    dtype: torch.dtype
    sum_O: Tensor | None = None

    @property
    def n(self) -> int:
        """Outputs, those that pad not counted."""
        return self.scale_O.shape[0]

    @property
    def k(self) -> int:
        """Columns as they are stored."""
        return self.codes_OI.shape[1]

    @property
    def kernel_weight(self) -> KernelWeight:
        """The weight as `hopper.cu` reads it, which refuses sizes that would be padded."""
        return KernelWeight("int8", self.codes_OI, self.n, self.k, self.scale_O, sum_O=self.sum_O)


def repack(
    weights: Sequence[Tensor | QuantizedWeight], *, dtype: torch.dtype, device: torch.device, gated: bool
) -> PackedInt8:
    """Stack weights along O; `gated` changes nothing, because kernels pair rows by their addresses."""
    quantized = coded(weights)
    codes_OI = stacked_codes(quantized, device)
    scale_O = stacked_scales(quantized, device).flatten()
    sum_O = None if quantized[0].scheme.input_symmetric else codes_OI.sum(dim=1, dtype=torch.int32)
    padded_OI = F.pad(codes_OI, (0, -codes_OI.shape[1] % MULTIPLE, 0, -codes_OI.shape[0] % MULTIPLE))
    return PackedInt8(padded_OI, scale_O, dtype, sum_O)


def zero_operands(x: QuantizedRows, packed: PackedInt8) -> tuple[Tensor | None, Tensor | None]:
    """Return the zero points of rows and the sums of codes that correct for them; None each for symmetric
    rows."""
    assert (x.zero_T is None) == (packed.sum_O is None), (
        "asymmetric rows need sums of codes, others have none"
    )
    return None if x.zero_T is None else x.zero_T.contiguous(), packed.sum_O


def linear(
    x: QuantizedRows,
    packed: PackedInt8,
    bias_O: Tensor | None,
    *,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x W^T, [T, O]."""
    assert x.values_TK.dtype == INT8, "rows of another type than the weight's"
    product_TO = int_product(x.values_TK, packed.codes_OI)[:, : packed.n]
    zero_T, sum_O = zero_operands(x, packed)
    if zero_T is not None and sum_O is not None:
        product_TO = product_TO - zero_T.unsqueeze(1) * sum_O
    y_TO = product_TO.to(torch.float32) * x.scale_T.unsqueeze(1) * packed.scale_O
    return finished(y_TO, packed.dtype if out_dtype is None else out_dtype, bias_O, residual_TO)


def int_product(x_TK: Tensor, w_OI: Tensor) -> Tensor:
    """Return the exact product int32 [T, O] of x int8 [T, K] and a weight that may be padded beyond K."""
    num_rows, k = x_TK.shape
    short = max(FEWEST_ROWS - num_rows, 0) if x_TK.is_cuda else 0
    padded = (
        F.pad(x_TK, (0, w_OI.shape[1] - k, 0, short)) if short or w_OI.shape[1] > k else x_TK.contiguous()
    )
    if not x_TK.is_cuda and not has_exact_int8():
        return _float32_product(padded, w_OI)
    return torch._int_mm(padded, w_OI.t())[:num_rows]


@functools.cache
def has_exact_int8() -> bool:
    """Return whether PyTorch's int8 product on this CPU is exact."""
    largest = torch.full((FEWEST_ROWS, 64), 127, dtype=INT8)
    return bool((torch._int_mm(largest, largest.t()) == 64 * 127 * 127).all())


def _float32_product(x_TK: Tensor, w_OI: Tensor) -> Tensor:
    parts = zip(x_TK.split(EXACT_DEPTH, dim=1), w_OI.split(EXACT_DEPTH, dim=1), strict=True)
    y_TO = x_TK.new_zeros(x_TK.shape[0], w_OI.shape[0], dtype=torch.int32)
    for x_part, w_part in parts:
        y_TO += torch.mm(x_part.to(torch.float32), w_part.to(torch.float32).t()).to(torch.int32)
    return y_TO


def refusal(problem: Problem) -> str | None:
    if problem.scheme not in SCHEMES:
        return f"for {', '.join(SCHEMES)}"
    if problem.activation is not None:
        return "applies no activation"
    return refuse_long_sums(problem)


def refuse_long_sums(problem: Problem) -> str | None:
    """Refuse K whose sums int32 may not hold."""
    if problem.k > (most := MAX_K_OF.get(problem.scheme, MAX_K)):
        return f"K = {problem.k} is above {most}, beyond which int32 sums could overflow"
    return None


register(Kernel("linear", "reference.int8", min_sm=0, priority=1, supports=refusal, fn=linear, repack=repack))
