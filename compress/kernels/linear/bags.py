"""Linears of integer weights on a CPU without a float copy of them: one byte a code (`code_table.py`).

    decode     y = sum_g s_g sum_{k in g} x_k q_k: the inner sums by PyTorch's bags of quantized embeddings,
               in float32, one bag for a group and 192 outputs; then scaled and added in float32
    prefill    the weights dequantized in parts, each multiplied in the tiles of `tiles.py`: the bits of the
               reference kernels, without their copy of the weights

A decode step passes one row at a time, so that every call has one shape: a row's bits depend on the row
alone. The product is exact on the codes, which the reference rounds to the scale's dtype after scaling, as
the kernels of four bits on a GPU do too.

A scale for a whole row of the weight has bags of at most 512 inputs, for threads to share.

Shapes: T rows, O out, I in, B blocks of C outputs, G scale groups, P bags of a block, R rows of the table.
"""

import functools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from compress.kernels.linear import tiles
from compress.kernels.linear.code_table import (
    CODED,
    MAX_BYTES,
    TABLE_COLUMNS,
    CodeTable,
    repack,
    table_bytes,
)
from compress.kernels.linear.coded import finished
from compress.kernels.linear.row_product import column_blocks, factor_dtype, row_product
from compress.kernels.problem import Problem
from compress.kernels.select import Kernel, register
from compress.quant.scheme import SCHEMES

BAG_ROWS = 512
FEWEST_BAG_ROWS = 16
"""Inputs of a bag below which its sums take more time than its codes."""
CAPABILITIES = ("AVX2", "AVX512")
"""Instruction sets for which PyTorch's library of embeddings (FBGEMM) generates code."""


def linear(
    x_TI: Tensor,
    packed: CodeTable,
    bias_O: Tensor | None,
    *,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x W^T [T, O], every row by calls of its own."""
    num_blocks, num_groups, _ = packed.scale_BGC.shape
    sums = bags_of(packed, bag_rows(packed.in_features, num_groups))
    y_TBC = x_TI.new_empty(x_TI.shape[0], num_blocks, TABLE_COLUMNS, dtype=torch.float32)
    for x_I, y_BC in zip(x_TI.to(torch.float32), y_TBC, strict=True):
        torch.sum(sums(x_I).mul_(packed.scale_BGC), dim=1, out=y_BC)
    y_TO = y_TBC.flatten(1)[:, : packed.out_features]
    return finished(y_TO, packed.dtype if out_dtype is None else out_dtype, bias_O, residual_TO)


def bag_rows(in_features: int, num_groups: int) -> int:
    """Return the inputs of a bag: a scale group, or the most up to 512 that divide a whole row."""
    if num_groups > 1:
        return in_features // num_groups
    return max(size for size in range(1, BAG_ROWS + 1) if in_features % size == 0)


def bags_of(packed: CodeTable, size: int) -> Callable[[Tensor], Tensor]:
    """Return a function of inputs float32 [I] that gives their sums over bags of `size` inputs, each times
    its codes, float32 [B, P, C]."""
    num_blocks = packed.scale_BGC.shape[0]
    starts = packed.rows_R[::size].contiguous()

    def sums(x_I: Tensor) -> Tensor:
        weights_R = x_I.expand(num_blocks, -1).reshape(-1)
        sums_PC = _bag_sums(packed.bytes_RC, packed.rows_R, starts, weights_R)
        return sums_PC.view(num_blocks, -1, TABLE_COLUMNS)

    return sums


def _bag_sums(bytes_RC: Tensor, rows_R: Tensor, starts: Tensor, weights_R: Tensor) -> Tensor:
    """Return float32 sums of table rows, each times its weight, over runs of `rows_R` that begin at
    `starts`."""
    sums: Tensor = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
        bytes_RC, rows_R, starts, False, 0, False, weights_R, None, False
    )
    return sums


@functools.cache
def bags_are_fast() -> bool:
    """Return whether this PyTorch has the operator, with code generated for this CPU, and it is a product
    with the codes."""
    if (
        torch.backends.cpu.get_cpu_capability() not in CAPABILITIES
        or "fbgemm" not in torch.backends.quantized.supported_engines
        or not hasattr(torch.ops.quantized, "embedding_bag_byte_rowwise_offsets")
    ):
        return False
    codes = torch.arange(2 * TABLE_COLUMNS, dtype=torch.int32).view(2, -1) % 256
    numbers = torch.tensor([[1.0, -8.0]] * 2).view(torch.uint8)
    rows_R, starts = (torch.tensor(each, dtype=torch.int32) for each in ([0, 1], [0]))
    table = torch.cat((codes.to(torch.uint8), numbers), dim=1)
    sums = _bag_sums(table, rows_R, starts, torch.tensor([3.0, -2.0]))
    expected = 3 * (codes[:1] - 8) - 2 * (codes[1:] - 8)
    return torch.equal(sums, expected.to(torch.float32))


def prefill(
    x_TI: Tensor,
    packed: CodeTable,
    bias_O: Tensor | None,
    *,
    rows: int,
    residual_TO: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x W^T [T, O] in tiles of `rows` rows, with the bits of `tiles.linear_in_tiles`."""
    factors = factor_dtype(packed.dtype, x_TI.device)
    if factors != torch.float32:  # a product of one block of all columns
        y_TO = row_product(x_TI, column_blocks(packed.dequantize().to(factors)), rows=rows)
    else:
        x_TI = x_TI.to(torch.float32)
        y_TO = torch.cat([row_product(x_TI, part, rows=rows) for part in packed.column_blocks()], dim=1)
    y_TO = finished(y_TO, packed.dtype, bias_O, residual_TO)
    return y_TO if out_dtype is None else y_TO.to(out_dtype)


def table_refusal(problem: Problem, schemes: tuple[str, ...]) -> str | None:
    """Return why a problem cannot be served from a table of bytes, or None."""
    if problem.scheme not in schemes:
        return f"for {', '.join(schemes)}"
    if problem.device != "cpu":
        return "for a CPU"
    if problem.activation is not None:
        return "applies no activation"
    if table_bytes(problem.n, problem.k) > MAX_BYTES:
        return f"its table would be larger than {MAX_BYTES} bytes"
    group_size = SCHEMES[problem.scheme].group_size
    if group_size is not None and problem.k % group_size:
        return f"K = {problem.k} is no multiple of {group_size}"
    if group_size is None and bag_rows(problem.k, 1) < FEWEST_BAG_ROWS:
        return f"K = {problem.k} has no divisor from {FEWEST_BAG_ROWS} to {BAG_ROWS}"
    if not bags_are_fast():
        return "needs PyTorch's FBGEMM operators, and a CPU with AVX2 or AVX-512"
    return None


def _decode_refusal(problem: Problem) -> str | None:
    return table_refusal(problem, CODED) if problem.row_invariant else "for decode rows"


def _prefill_refusal(problem: Problem, *, few_rows: bool) -> str | None:
    if problem.row_invariant:
        return "for the rows of prompts"
    return table_refusal(problem, CODED) or tiles.tile_refusal(problem, few_rows=few_rows, device="cpu")


def _register(name: str, fn: Callable[..., Tensor], supports: Callable[[Problem], str | None]) -> None:
    register(Kernel("linear", name, min_sm=0, priority=2, supports=supports, fn=fn, repack=repack))


_register("bags.decode", linear, _decode_refusal)
for _few_rows, _rows in ((True, tiles.DECODE_ROWS), (False, tiles.PREFILL_ROWS["cpu"])):
    _supports = partial(_prefill_refusal, few_rows=_few_rows)
    _register(f"bags.prefill.tile{_rows}", partial(prefill, rows=_rows), _supports)
