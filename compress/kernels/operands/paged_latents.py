"""Paged latents of one layer with latent attention (arXiv 2405.04434): of each position the normed latent of
keys and values, and after it the dimensions of the keys that rotate, turned by the position. All heads read
them.

Formats are those of `paged.py` that are dense, FP8_TOKEN_HEAD and INT8_TOKEN_HEAD; a position has one scale.

Shapes: N blocks, S positions of a block, W numbers of a position: R of the latent and P that rotate.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.operands.paged import (
    DENSE_FORMATS,
    FP8_TOKEN_HEAD,
    INT8_TOKEN_HEAD,
    PAGE_DTYPES,
    PagedKV,
    read_pages,
    write_pages_,
)
from compress.kernels.operands.rows import FP8

LATENT_FORMATS = (*DENSE_FORMATS.values(), FP8_TOKEN_HEAD, INT8_TOKEN_HEAD)


@dataclass(frozen=True)
class PagedLatents:
    """One layer's pages [1, N, S, W], and float32 scales [1, N, S] of codes. The first axis is that of heads,
    which share them."""

    rows: Tensor
    scale: Tensor | None = None

    @staticmethod
    def empty(
        kv_format: str, num_blocks: int, block_size: int, width: int, device: torch.device
    ) -> "PagedLatents":
        """Return zeroed pages of a format."""
        shape = (1, num_blocks, block_size)
        coded = kv_format not in DENSE_FORMATS.values()
        scale = torch.zeros(shape, dtype=torch.float32, device=device) if coded else None
        return PagedLatents(torch.zeros(*shape, width, dtype=PAGE_DTYPES[kv_format], device=device), scale)

    def empty_like(self, num_blocks: int, block_size: int) -> "PagedLatents":
        """Return zeroed pages of the same width and format."""
        width = self.rows.shape[3]
        return PagedLatents.empty(self.format, num_blocks, block_size, width, self.rows.device)

    @property
    def block_size(self) -> int:
        return self.rows.shape[2]

    @property
    def heads_and_width(self) -> tuple[int, int]:
        """The heads of a position, which is one, and the numbers of it."""
        return 1, self.rows.shape[3]

    @property
    def format(self) -> str:
        if self.scale is None:
            return DENSE_FORMATS[self.rows.dtype]
        return FP8_TOKEN_HEAD if self.rows.dtype == FP8 else INT8_TOKEN_HEAD

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that have blocks, along axis 1."""
        return (self.rows,) if self.scale is None else (self.rows, self.scale)

    def write_(self, slots_T: Tensor, rows_TW: Tensor) -> None:
        """Store positions, rounded to the format. This is the definition that kernels are tested against."""
        write_pages_(self.rows, self.scale, slots_T, rows_TW.unsqueeze(0))

    def gather(self, blocks_B: Tensor, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the positions of these blocks in `dtype`, as latents [B S, R] of `rank` numbers and the
        dimensions that rotate [B S, P]."""
        parts = self.rows[..., :rank], self.rows[..., rank:]
        latent, rotated = (read_pages(part, self.scale, blocks_B, dtype)[0].flatten(0, 1) for part in parts)
        return latent, rotated

    def gathered(self, slots_TK: Tensor) -> "PagedLatents":
        """Return pages of the positions of these slots alone, those of each row in blocks of their own; K is
        a multiple of the positions of a block."""
        slots = slots_TK.flatten()
        rows = self.rows.view(torch.uint8).flatten(1, 2).index_select(1, slots).view(self.rows.dtype)
        scale = None if self.scale is None else self.scale.flatten(1).index_select(1, slots)
        blocks = (-1, self.block_size)
        return PagedLatents(rows.unflatten(1, blocks), None if scale is None else scale.unflatten(1, blocks))

    def numbers(self, blocks_RB: Tensor, positions: slice, numbers: slice) -> Tensor:
        """Return some numbers of the positions of sequences that lie in these blocks, float32 [R, P, F]: of
        the positions from the first block on, those of a slice without a step."""
        first, last, _ = positions.indices(blocks_RB.shape[1] * self.block_size)
        column = first // self.block_size
        read_RB = blocks_RB[:, column : -(-last // self.block_size)]
        found = read_pages(self.rows[..., numbers], self.scale, read_RB.flatten(), torch.float32)
        found_RPF = found[0].flatten(0, 1).unflatten(0, (len(blocks_RB), read_RB.shape[1] * self.block_size))
        begin = first - column * self.block_size
        return found_RPF[:, begin : begin + last - first]

    def as_heads(self) -> PagedKV:
        """Return the pages as keys and values of one head, which are the same."""
        return PagedKV(self.rows, self.rows, self.scale, self.scale)


def slots_of(positions_TNK: Tensor, block_table_TB: Tensor, block_size: int) -> Tensor:
    """Return the slots [T, N, K] of positions of the sequences with these blocks, int64."""
    blocks = block_table_TB.gather(1, (positions_TNK // block_size).flatten(1))
    return blocks.view(positions_TNK.shape).long() * block_size + positions_TNK % block_size


Pages = PagedKV | PagedLatents
"""The pages of a layer."""
