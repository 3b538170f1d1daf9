"""Reference of compressed attention over the paged cache (`models/compressed.py`): entries are computed anew
from the positions in the cache, and each row attends to those of its sequence that it sees and to its window.

Keys lie in chunks of a fixed number: first the entries, then the positions. Chunks are attended to as in
`attention_decode/chunks.py`, and functions of single numbers are taken of whole vectors, so that the bits of
a row depend on its sequence up to its position alone: not on the pass, nor on other sequences.

Shapes: T rows, R sequences, B blocks of the longest, H heads, C head dimension, P positions and E entries of
the longest sequence, J chunks of N keys, F numbers of a position for entries, L positions of a table.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.act_mul.reference import in_whole_vectors
from compress.kernels.attention_decode.chunks import CHUNK_SIZE, attend_to_chunks, filling_of
from compress.kernels.operands.compressed import EntryWeights
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.rms_norm.reference import rms_norm
from compress.kernels.select import Kernel, anything, register
from compress.models.compressed import entries, turned

MOST_GATHERED = 1 << 26
"""Numbers of the keys of the rows that attend at once, about: 256 MiB."""


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
) -> Tensor:
    """Return [T, H, C], turned back by the position of each row. Row t is of sequence `sequence_T[t]`, the
    index of its blocks, and the cache has its positions up to `positions_T[t]`; `weights` is None in layers
    without entries."""
    head_dim = q_THC.shape[2]
    table_RB = F.pad(block_table_RB, (0, -block_table_RB.shape[1] % (CHUNK_SIZE // pages.block_size)))
    k_MC, raw_MF = pages.gather(table_RB.flatten(), head_dim, torch.float32)
    k_RPC = k_MC.unflatten(0, (len(table_RB), -1))
    keys = k_RPC.unflatten(1, (-1, CHUNK_SIZE))
    ends_P = torch.arange(1, k_RPC.shape[1] + 1, device=q_THC.device)
    num_chunks = 0
    seen_TP = _window(ends_P, positions_T, window)
    if weights is not None:
        raw_RPF = raw_MF.unflatten(0, (len(table_RB), -1))
        entries_RJNC = _entries(weights, raw_RPF, cos_LR, sin_LR, q_THC.dtype)
        num_chunks = entries_RJNC.shape[1]
        keys = torch.cat((entries_RJNC, keys), dim=1)
        ends_E = torch.arange(1, num_chunks * CHUNK_SIZE + 1, device=q_THC.device) * weights.facts.rate
        seen_TP = torch.cat((ends_E <= positions_T.unsqueeze(1) + 1, seen_TP), dim=1)
    unseen_TJN = ~seen_TP.unflatten(1, (-1, CHUNK_SIZE))
    at_once = max(1, MOST_GATHERED // keys[0].numel())
    attended = [
        _attended(
            q_THC[start : start + at_once],
            keys[sequence_T[start : start + at_once]],
            unseen_TJN[start : start + at_once],
            scale,
            sinks_H,
        )
        for start in range(0, len(q_THC), at_once)
    ]
    attended_THC = attended[0] if len(attended) == 1 else torch.cat(attended)
    return turned(attended_THC, (cos_LR[positions_T], sin_LR[positions_T]), back=True)


def _window(ends_P: Tensor, positions_T: Tensor, window: int) -> Tensor:
    """Return bool [T, P], True where a row sees a position."""
    last_T1 = positions_T.unsqueeze(1) + 1
    return (ends_P <= last_T1) & (ends_P > last_T1 - window)


def _entries(
    weights: EntryWeights, raw_RPF: Tensor, cos_LR: Tensor, sin_LR: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the entries [R, J, N, C], float32, of all positions, with zeros up to whole chunks. Those that
    are not over yet are computed of whatever the cache holds, and no row sees them."""
    rate = weights.facts.rate
    summed_REC = entries(weights.facts, raw_RPF, weights.positions, in_whole_vectors).to(dtype)
    normed_REC = rms_norm(summed_REC, weights.norm.weight, weights.norm.eps)
    starts_E = (torch.arange(normed_REC.shape[1], device=normed_REC.device) * rate).clamp(max=len(cos_LR) - 1)
    turned_REC = turned(normed_REC.unsqueeze(2), (cos_LR[starts_E], sin_LR[starts_E])).squeeze(2)
    whole_REC = F.pad(turned_REC.to(torch.float32), (0, 0, 0, -turned_REC.shape[1] % CHUNK_SIZE))
    return whole_REC.unflatten(1, (-1, CHUNK_SIZE))


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
