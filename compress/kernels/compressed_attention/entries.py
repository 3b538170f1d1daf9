"""The entries of the sequences of a pass, computed anew from the positions in the cache
(`models/compressed.py`), and those of them that rows attend to: all, or those that an indexer chooses.

Entries that are chosen lie one after the other as they do among all of them, so that a choice of all is no
other arrangement. Functions of single numbers are taken of whole vectors, and an entry is computed of its
positions alone, however many are computed at once.

Shapes: T rows, R sequences, B blocks of the longest, C head dimension of entries, E entries, J chunks of N of
them, P positions, F numbers of a position for entries, L positions of a table.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels.act_mul.reference import in_whole_vectors
from compress.kernels.attention_decode.chunks import CHUNK_SIZE
from compress.kernels.compressed_attention.scores import scores_of
from compress.kernels.operands.compressed import EntryChoice, EntryWeights
from compress.kernels.operands.paged_latents import PagedLatents
from compress.kernels.rms_norm.reference import rms_norm
from compress.models.chosen_keys import chosen_keys, positions_of
from compress.models.compressed import entries, turned

MOST_KEYS = 1 << 26
"""Numbers of keys that are gathered for rows at once, about: 256 MiB."""
MOST_RAW = 1 << 24
"""Numbers of which entries are computed at once, about: 64 MiB, and four to five times as many on the way."""
Tables = tuple[Tensor, Tensor]
"""cos and sin [L, R] of the positions."""


@dataclass(frozen=True)
class Entries:
    """The entries [R, J, N, C] of all sequences, float32, and those [R, J, N, I] that are scored, None where
    rows attend to all that they see."""

    rate: int
    whole_RJNC: Tensor
    scored_RJNI: Tensor | None
    choice: EntryChoice | None
    tables: Tables

    @staticmethod
    def of(
        weights: EntryWeights,
        choice: EntryChoice | None,
        pages: PagedLatents,
        head_dim: int,
        table_RB: Tensor,
        tables: Tables,
        dtype: torch.dtype,
    ) -> "Entries":
        """Return the entries of the sequences of a table, which are rounded to `dtype`. The numbers that they
        are computed of follow the key of a position, those for scores last."""
        num_entries = table_RB.shape[1] * pages.block_size // weights.facts.rate
        if choice is not None and num_entries <= choice.top_entries:
            choice = None
        scored_RJNI = None
        if choice is not None:
            begin = head_dim + weights.raw_width
            scored_RJNI = _computed(choice.weights, pages, begin, table_RB, tables, dtype)
        whole_RJNC = _computed(weights, pages, head_dim, table_RB, tables, dtype)
        return Entries(weights.facts.rate, whole_RJNC, scored_RJNI, choice, tables)

    @property
    def numbers_of_row(self) -> int:
        """The numbers that `of_rows` gathers for a row, about."""
        if self.scored_RJNI is None or self.choice is None:
            return self.whole_RJNC[0].numel()
        num_heads, index_dim = self.choice.q_TNI.shape[1:]
        of_scores = self.scored_RJNI[0].numel() // index_dim * (index_dim + num_heads)
        return of_scores + self.choice.top_entries * self.whole_RJNC.shape[3]

    def of_rows(self, rows: slice, sequence_T: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return the entries [T, J, N, C] for these rows of a pass, and bool [T, J N], True where a row
        attends to an entry."""
        end_T1 = positions_T.unsqueeze(1) + 1
        if self.scored_RJNI is None or self.choice is None:
            keys_TJNC = self.whole_RJNC[sequence_T]
            return keys_TJNC, self._ends(keys_TJNC.shape[1] * CHUNK_SIZE) <= end_T1
        q_TNI = turned(self.choice.q_TNI[rows], (self.tables[0][positions_T], self.tables[1][positions_T]))
        scores_TE = scores_of(q_TNI, self.choice.factors_TN[rows], self.scored_RJNI[sequence_T])
        over_TE = self._ends(scores_TE.shape[1]) <= end_T1
        top_entries = self.choice.top_entries
        chosen_TE = chosen_keys(scores_TE, over_TE, top_entries)
        chosen_TK = positions_of(chosen_TE, top_entries)
        keys_TKC = self.whole_RJNC.flatten(1, 2)[sequence_T.unsqueeze(1), chosen_TK]
        keys_TJNC = F.pad(keys_TKC, (0, 0, 0, -top_entries % CHUNK_SIZE)).unflatten(1, (-1, CHUNK_SIZE))
        places = torch.arange(keys_TJNC.shape[1] * CHUNK_SIZE, device=scores_TE.device)
        return keys_TJNC, places < chosen_TE.sum(dim=1, keepdim=True)

    def _ends(self, num_entries: int) -> Tensor:
        """Return the number of positions after which each entry is seen."""
        return torch.arange(1, num_entries + 1, device=self.whole_RJNC.device) * self.rate


def _computed(
    weights: EntryWeights,
    pages: PagedLatents,
    begin: int,
    table_RB: Tensor,
    tables: Tables,
    dtype: torch.dtype,
) -> Tensor:
    """Return the entries [R, J, N, C], float32, of all positions, with zeros up to whole chunks, of the
    numbers of a position from `begin` on. Those that are not over yet are computed of whatever the cache
    holds, and no row sees them."""
    rate = weights.facts.rate
    num_entries = table_RB.shape[1] * pages.block_size // rate
    at_once = max(1, MOST_RAW // (len(table_RB) * rate * weights.raw_width))
    parts = []
    for first in range(0, max(1, num_entries), at_once):
        last = min(first + at_once, num_entries)
        num_before = int(weights.facts.overlaps and first > 0)
        positions = slice((first - num_before) * rate, last * rate)
        raw_RPF = pages.numbers(table_RB, positions, slice(begin, begin + weights.raw_width))
        summed_REC = entries(weights.facts, raw_RPF, weights.positions, in_whole_vectors)
        normed_REC = rms_norm(summed_REC[:, num_before:].to(dtype), weights.norm.weight, weights.norm.eps)
        starts_E = torch.arange(first, last, device=table_RB.device) * rate
        starts_E = starts_E.clamp(max=len(tables[0]) - 1)
        parts.append(turned(normed_REC.unsqueeze(2), (tables[0][starts_E], tables[1][starts_E])).squeeze(2))
    whole_REC = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).to(torch.float32)
    return F.pad(whole_REC, (0, 0, 0, -num_entries % CHUNK_SIZE)).unflatten(1, (-1, CHUNK_SIZE))
