"""Integer weights on a CPU as a table of bytes: the layout, and the float numbers that prompts multiply by.

PyTorch's bag of quantized embeddings, `quantized::embedding_bag_byte_rowwise_offsets`, is a product of rows
and byte codes in float32: a bag is a run of table rows, each weighed by a number, and its result is their
sum. `bags.py` gives it inputs as weights. The layout is the operator's:

    row b I + k     C bytes: the codes of input k for outputs b C .. b C + C - 1, each plus `offset`;
                    float32 1 and -offset, by which the operator reads byte u as u - offset

A code of 4, 3 or 2 bits takes a byte too. The operator for nibbles takes twice the time for one row and is
slower than dense float32 from four rows on (two cores of a Zen 4, docs/LOG.md). A zero point is subtracted
from the codes here, where the difference is exact; outputs are filled up with zeros to whole blocks.

C is four blocks of `row_product.py`, so that blocks for prompts are cut from the table without a transpose.

Shapes: O out, I in, B blocks of C outputs, G scale groups along I, R = B I rows of the table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.linear.coded import coded, stacked_codes
from compress.kernels.linear.row_product import ALIGNMENT, BLOCK_COLUMNS, ColumnBlocks
from compress.quant.scheme import SCHEMES, QuantizedWeight

TABLE_COLUMNS = 4 * BLOCK_COLUMNS
NUMBERS_BYTES = 8
"""Bytes of the scale and the bias that end a row of the table."""
MAX_BYTES = 1 << 31
PART_BYTES = 1 << 23
"""Bytes of the float32 blocks that a prompt multiplies by at once; one block of outputs may have more."""
CODED = tuple(name for name, scheme in SCHEMES.items() if scheme.type == "int" and scheme.activation is None)
"""The weight-only integer schemes."""


@dataclass(frozen=True)
class CodeTable:
    """A weight [O, I] as `bytes_RC` uint8 [B I, C + 8] and scales [B, G, C] in their stored dtype; `dtype` is
    the model's. `rows_R` counts the rows of the table, int32, as the operator takes them."""

    bytes_RC: Tensor
    rows_R: Tensor
    scale_BGC: Tensor
    out_features: int
    offset: int
    dtype: torch.dtype

    @property
    def in_features(self) -> int:
        return self.bytes_RC.shape[0] // self.scale_BGC.shape[0]

    def column_blocks(self) -> Iterator[ColumnBlocks]:
        """Yield the dequantized weight as float32 blocks of `row_product`, some outputs after the other: the
        blocks that `row_product.column_blocks` makes of the whole weight."""
        num_blocks = self.scale_BGC.shape[0]
        in_features = self.in_features
        missing = -in_features % (ALIGNMENT // 4)
        size = max(1, PART_BYTES // (4 * in_features * TABLE_COLUMNS))
        for start in range(0, num_blocks, size):
            w_BIN = self._dequantized(start, min(start + size, num_blocks)).to(torch.float32)
            columns = min(w_BIN.shape[0] * BLOCK_COLUMNS, self.out_features - start * TABLE_COLUMNS)
            yield ColumnBlocks(F.pad(w_BIN, (0, 0, 0, missing)) if missing else w_BIN, columns)

    def dequantize(self) -> Tensor:
        """Return the weight [O, I] in the dtype of its scales."""
        w_BIN = self._dequantized(0, self.scale_BGC.shape[0])
        return w_BIN.transpose(1, 2).flatten(0, 1)[: self.out_features]

    def _dequantized(self, start: int, end: int) -> Tensor:
        """Return the weight of some blocks of C outputs, [4 B, I, C / 4], in the dtype of its scales. A code
        is exact in 16 bits, and its product is rounded once. Bytes are put in order first: a copy of narrow
        columns takes three times as long of wider numbers, and a cast of them eight times."""
        narrow = (-1, BLOCK_COLUMNS)
        bytes_BIC = self.bytes_RC.view(self.scale_BGC.shape[0], -1, self.bytes_RC.shape[1])
        bytes_BIKN = bytes_BIC[start:end, :, :TABLE_COLUMNS].unflatten(2, narrow)
        scale_BGKN = self.scale_BGC[start:end].unflatten(2, narrow)
        codes_BKIN = bytes_BIKN.transpose(1, 2).contiguous().sub_(self.offset).view(torch.int8)
        w_BKIN = codes_BKIN.to(scale_BGKN.dtype)
        w_BKIN.unflatten(2, (scale_BGKN.shape[1], -1)).mul_(scale_BGKN.transpose(1, 2).unsqueeze(3))
        return w_BKIN.flatten(0, 1)


def table_bytes(out_features: int, in_features: int) -> int:
    """Return the bytes of the table of a weight."""
    return -(-out_features // TABLE_COLUMNS) * in_features * (TABLE_COLUMNS + NUMBERS_BYTES)


def repack(
    weights: Sequence[Tensor | QuantizedWeight], *, dtype: torch.dtype, device: torch.device, gated: bool
) -> CodeTable:
    """Stack weights along O. Scales of several dtypes become the widest one's."""
    assert not gated, "the linears of a CPU apply no activation"
    quantized = coded(weights)
    scheme = quantized[0].scheme
    codes_OI = stacked_codes(quantized, device)
    scale_OG = torch.cat([weight.scale_OG.to(device) for weight in quantized])
    out_features, in_features = codes_OI.shape
    num_groups = scale_OG.shape[1]
    offset = -scheme.min_code
    zeros = [weight.zero_point_OG for weight in quantized if weight.zero_point_OG is not None]
    if zeros:
        zero_OG = torch.cat([zero.to(device) for zero in zeros])
        codes_OI = (codes_OI.view(out_features, num_groups, -1) - zero_OG.unsqueeze(-1)).view_as(codes_OI)
        offset = scheme.max_code - scheme.min_code
    missing = -out_features % TABLE_COLUMNS
    num_blocks = (out_features + missing) // TABLE_COLUMNS
    rows_RC = torch.empty(
        num_blocks * in_features, TABLE_COLUMNS + NUMBERS_BYTES, dtype=torch.uint8, device=device
    )
    codes_BCI = F.pad(codes_OI, (0, 0, 0, missing)).view(num_blocks, TABLE_COLUMNS, in_features)
    rows_BIC = rows_RC.view(num_blocks, in_features, -1)
    rows_BIC[..., :TABLE_COLUMNS] = (codes_BCI.to(torch.int16) + offset).to(torch.uint8).transpose(1, 2)
    numbers = torch.tensor([1.0, -offset], dtype=torch.float32, device=device)
    rows_RC[:, TABLE_COLUMNS:] = numbers.view(torch.uint8)
    scale_BCG = F.pad(scale_OG, (0, 0, 0, missing)).view(num_blocks, TABLE_COLUMNS, num_groups)
    counted_R = torch.arange(rows_RC.shape[0], dtype=torch.int32, device=device)
    scale_BGC = scale_BCG.transpose(1, 2).contiguous()
    return CodeTable(rows_RC, counted_R, scale_BGC, out_features, offset, dtype)
