"""Reference of compressed attention over the paged cache (`models/compressed.py`): each row attends to the
entries of its sequence that it sees, or that an indexer chooses of them, and to its window.

Keys lie in chunks of a fixed number: first those of entries (`entries.py`), then those of positions, of
which the chunks that a window touches are read. Chunks are attended to as in `attention_decode/chunks.py`,
where one that a row does not see adds zero, so that the bits of a row depend on its sequence up to its
position alone: not on the pass, nor on other sequences.

Shapes: T rows, R sequences, B blocks of the longest, H heads, C head dimension, P positions, J chunks of N
keys, L positions of a table.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.attention_decode.chunks import CHUNK_SIZE, attend_to_chunks, filling_of
from compress.kernels.compressed_attention.entries import MOST_KEYS, Entries
from compress.kernels.operands.compressed import EntryChoice, EntryWeights
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.select import Kernel, anything, register
from compress.models.compressed import turned


def compressed_attention(
    q_THC: Tensor,
    pages: PagedLatents,
    weights: EntryWeights | None,
    cos_LR: Tensor,
    sin_LR: Tensor,
    block_table_RB: Tensor,
    sequence_T: Tensor,
    positions_T: Tensor,
    *,
    window: int,
    scale: float,
    sinks_H: Tensor,
    choice: EntryChoice | None = None,
) -> Tensor:
    """Return [T, H, C], turned back by the position of each row. Row t is of sequence `sequence_T[t]`, the
    index of its blocks, and the cache has its positions up to `positions_T[t]`; `weights` is None in layers
    without entries, and `choice` where rows attend to all that they see."""
    head_dim = q_THC.shape[2]
    table_RB = _read_blocks(block_table_RB, positions_T, pages.block_size)
    # A window touches so many chunks at most.
    num_near = min(
        (window + CHUNK_SIZE - 2) // CHUNK_SIZE + 1, table_RB.shape[1] * pages.block_size // CHUNK_SIZE
    )
    numbers_of_row = num_near * CHUNK_SIZE * head_dim
    far = None
    if weights is not None:
        far = Entries.of(weights, choice, pages, head_dim, table_RB, (cos_LR, sin_LR), q_THC.dtype)
        numbers_of_row += far.numbers_of_row

    def attended(rows: slice) -> Tensor:
        of_rows = sequence_T[rows], positions_T[rows]
        keys_TJNC, seen_TP = _near(pages, head_dim, table_RB, *of_rows, window, num_near)
        if far is not None:
            entries_TJNC, over_TE = far.of_rows(rows, *of_rows)
            keys_TJNC = torch.cat((entries_TJNC, keys_TJNC), dim=1)
            seen_TP = torch.cat((over_TE, seen_TP), dim=1)
        return _attended(q_THC[rows], keys_TJNC, ~seen_TP.unflatten(1, (-1, CHUNK_SIZE)), scale, sinks_H)

    at_once = max(1, MOST_KEYS // numbers_of_row)
    parts = [attended(slice(start, start + at_once)) for start in range(0, len(q_THC), at_once)]
    attended_THC = parts[0] if len(parts) == 1 else torch.cat(parts)
    return turned(attended_THC, (cos_LR[positions_T], sin_LR[positions_T]), back=True)


def _read_blocks(block_table_RB: Tensor, positions_T: Tensor, block_size: int) -> Tensor:
    """Return the blocks of whole chunks that rows read: on a CPU up to the last position of all, on a GPU,
    where the host does not wait for positions, all."""
    if not block_table_RB.is_cuda:
        block_table_RB = block_table_RB[:, : int(positions_T.max()) // block_size + 1]
    return F.pad(block_table_RB, (0, -block_table_RB.shape[1] % (CHUNK_SIZE // block_size)))


def _near(
    pages: PagedLatents,
    head_dim: int,
    table_RB: Tensor,
    sequence_T: Tensor,
    positions_T: Tensor,
    window: int,
    num_chunks: int,
) -> tuple[Tensor, Tensor]:
    """Return the keys [T, J, N, C] of the chunks of positions from the one in which a row's window begins,
    and bool [T, J N], True where the row sees a position."""
    last_T1 = positions_T.unsqueeze(1) + 1
    first_T1 = (last_T1 - window).clamp(min=0) // CHUNK_SIZE
    chunks_TJ = first_T1 + torch.arange(num_chunks, device=positions_T.device)
    blocks_RJB = table_RB.unflatten(1, (-1, CHUNK_SIZE // pages.block_size))
    read_TJ = chunks_TJ.clamp(max=blocks_RJB.shape[1] - 1)
    blocks_TB = blocks_RJB[sequence_T.unsqueeze(1), read_TJ].flatten(1)
    keys_TPC = pages.numbers(blocks_TB, slice(None), slice(head_dim))
    within_N = torch.arange(1, CHUNK_SIZE + 1, device=positions_T.device)
    ends_TP = (chunks_TJ.unsqueeze(2) * CHUNK_SIZE + within_N).flatten(1)
    seen_TP = (ends_TP <= last_T1) & (ends_TP > last_T1 - window)
    return keys_TPC.unflatten(1, (num_chunks, CHUNK_SIZE)), seen_TP


def _attended(q_RHC: Tensor, keys_RJNC: Tensor, unseen_RJN: Tensor, scale: float, sinks_H: Tensor) -> Tensor:
    """Return attention [R, H, C] of rows to their chunks of keys, which are the values, too."""
    keys_XNC = keys_RJNC.flatten(0, 1)
    filling = filling_of(q_RHC, 1, len(keys_XNC))
    keys_XNC = F.pad(keys_XNC, (0, 0, 0, 0, 0, filling))
    return attend_to_chunks(q_RHC, keys_XNC, keys_XNC, unseen_RJN.unsqueeze(2), scale=scale, sinks_H=sinks_H)


register(
    Kernel(
        "compressed_attention", "reference", min_sm=0, priority=0, supports=anything, fn=compressed_attention
    )
)
