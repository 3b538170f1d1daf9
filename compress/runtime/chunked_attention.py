"""Attention in chunks (`LayerShape.chunk`) by kernels of whole sequences.

Keys are in the cache as they are attended to, rotated by their own positions, so attention sees no positions.
A chunk of a sequence is then a sequence of its own: its blocks are some columns of the block table, and its
length ends at the query. The rows of a prefill pass are cut where chunks begin. The last `q_len` rows of a
decode pass may lie in two chunks: every row runs in the chunk of the last row and in that of the first, and
takes the result of its own. A model that is served up to one chunk attends to whole sequences.

Block tables of a decode pass are computed before its first layer: kernels may read them before the launch
before theirs has ended (`kernels/attention_decode/hopper.py`).

Shapes: T rows, Q of them of each sequence, R sequences, B blocks of the longest one, H heads, C head
dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.errors import UsageError
from compress.kernels.step.host_memory import sent
from compress.models.arch import Arch


def chunk_sizes(arch: Arch, max_model_len: int) -> tuple[int, ...]:
    """Return the sizes of the chunks that sequences of a model have several of."""
    sizes = {layer.chunk for layer in arch.layers if layer.chunk is not None}
    return tuple(sorted(size for size in sizes if size < max_model_len))


def check_chunks(arch: Arch, block_size: int, max_model_len: int) -> None:
    """Refuse a cache whose blocks lie in two chunks.

    Raises:
        UsageError: the size of a chunk is no multiple of the block size.
    """
    for size in chunk_sizes(arch, max_model_len):
        if size % block_size:
            raise UsageError(
                f"attention of this model has chunks of {size} positions, which are no whole blocks of "
                f"{block_size}. Set another block_size, or max_model_len to {size} at most."
            )


@dataclass(frozen=True)
class _Chunk:
    """One chunk of each sequence, as decode attention takes it."""

    table_RB: Tensor
    context_lens_R: Tensor


class DecodeChunks:
    """The chunks of the last `q_len` rows of each sequence."""

    def __init__(
        self, block_table_RB: Tensor, context_lens_R: Tensor, *, q_len: int, chunk: int, block_size: int
    ) -> None:
        self._q_len = q_len
        last_R = (context_lens_R - 1) // chunk
        num_columns = min(block_table_RB.shape[1], chunk // block_size + (q_len > 1))
        columns = torch.arange(num_columns, device=block_table_RB.device)

        def of(index_R: Tensor) -> _Chunk:
            columns_RB = (index_R * (chunk // block_size)).unsqueeze(1) + columns
            table_RB = block_table_RB.gather(1, columns_RB.clamp(max=block_table_RB.shape[1] - 1))
            return _Chunk(table_RB, context_lens_R - index_R * chunk)

        self._last = of(last_R)
        if q_len > 1:
            positions_RQ = (context_lens_R - q_len).unsqueeze(1) + torch.arange(q_len, device=columns.device)
            self._first = of(positions_RQ[:, 0].clamp(min=0) // chunk)
            self._in_last_T11 = (positions_RQ // chunk == last_R.unsqueeze(1)).view(-1, 1, 1)

    def attend(self, attention: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return attention [T, H, C]; `attention` computes it for a block table and context lengths."""
        last_THC = attention(self._last.table_RB, self._last.context_lens_R)
        if self._q_len == 1:
            return last_THC
        first_THC = attention(self._first.table_RB, self._first.context_lens_R)
        return torch.where(self._in_last_T11, last_THC, first_THC)


@dataclass(frozen=True)
class PrefillChunks:
    """The rows of a ragged prefill pass, cut where chunks begin: each part is a sequence of its own."""

    table_RB: Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]

    @staticmethod
    def of(
        block_table_RB: Tensor,
        query_lens: tuple[int, ...],
        context_lens: tuple[int, ...],
        *,
        chunk: int,
        block_size: int,
    ) -> "PrefillChunks":
        """Cut `query_lens[r]` rows at the end of each context."""
        parts = []
        for sequence, (query_len, end) in enumerate(zip(query_lens, context_lens, strict=True)):
            start = end - query_len
            while start < end:
                begin = start // chunk * chunk
                stop = min(end, begin + chunk)
                parts.append((sequence, begin // block_size, stop - start, stop - begin))
                start = stop
        places_P2 = sent(torch.tensor([part[:2] for part in parts]), block_table_RB.device)
        sequences, columns = places_P2.unbind(1)
        num_columns = block_table_RB.shape[1]
        within = torch.arange(min(num_columns, chunk // block_size), device=block_table_RB.device)
        columns_RB = (columns.unsqueeze(1) + within).clamp(max=num_columns - 1)
        return PrefillChunks(
            block_table_RB[sequences].gather(1, columns_RB),
            tuple(part[2] for part in parts),
            tuple(part[3] for part in parts),
        )
