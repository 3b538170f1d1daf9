"""One pass that scores whole sequences: prefill over pages of its own, which no other pass sees.

Shapes: B sequences, N blocks of the longest, T rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from compress.kernels.operands.paged import FP8_STATIC, PagedKV
from compress.kernels.operands.paged_latents import PagedLatents, Pages
from compress.kernels.operands.recurrent_states import RecurrentStates
from compress.kernels.problem import Phase
from compress.models.arch import Arch
from compress.models.recurrence import Recurrence
from compress.runtime.batch import slots_of
from compress.runtime.chunked_attention import chunk_sizes
from compress.runtime.compressed_attention import CompressedAttention
from compress.runtime.kv_cache import IndexedKept, JointKept, Kept, KVCache, NGramKept
from compress.runtime.latent_attention import LatentAttention
from compress.runtime.layer_attention import Attend, LayerAttention

_SCRATCH_BLOCK = 64


@dataclass(frozen=True)
class ScoringPass:
    """The arguments of a layer other than its weights and the stream: positions [T], slots [T], the pages of
    a layer, what returns the attention of one pass over all layers, and the phase whose kernels serve."""

    positions_T: torch.Tensor
    slots_T: torch.Tensor
    pages: Callable[[int], Kept]
    begin: Callable[[], Attend]
    phase: Phase


def scratch_block_size(arch: Arch, max_model_len: int) -> int:
    """Return the positions of a block of the pages, of which chunks of attention are whole numbers."""
    return math.gcd(_SCRATCH_BLOCK, *chunk_sizes(arch, max_model_len))


def scoring_pass(
    attention: LayerAttention | LatentAttention | CompressedAttention,
    cache: KVCache,
    lens: tuple[int, ...],
    *,
    block_size: int,
    short: bool,
    device: torch.device,
) -> ScoringPass:
    """Return the pass over sequences of these lengths, one after the other; `short` ones use the decode
    kernels of the linears."""
    num_columns = -(-max(lens) // block_size)
    # The first blocks come first: they are the slots of states.
    table_BN = 1 + torch.arange(num_columns * len(lens)).view(num_columns, -1).t().contiguous()
    positions = [torch.arange(length) for length in lens]
    slots = [slots_of(each, blocks, block_size) for each, blocks in zip(positions, table_BN, strict=True)]
    pages = _ScratchPages(cache, len(lens), num_columns, block_size)
    table_BN = table_BN.to(device)
    phase: Phase = "decode" if short else "prefill"
    begin = partial(attention.prefill, table_BN, lens, lens, block_size=block_size, phase=phase)
    return ScoringPass(
        torch.cat(positions).to(device), torch.cat(slots).to(device), pages.layer, begin, phase
    )


class _ScratchPages:
    """Pages for one pass in the format of the cache. Layers of the same shape share them, unless later ones
    read what is in them."""

    def __init__(self, cache: KVCache, num_sequences: int, num_columns: int, block_size: int) -> None:
        self._cache = cache
        self._num_sequences = num_sequences
        self._num_blocks = 1 + num_sequences * num_columns
        self._block_size = block_size
        self._made: dict[tuple[tuple[int, int], bool, int | None], Pages] = {}
        self._states: dict[Recurrence, RecurrentStates] = {}

    def layer(self, layer_idx: int) -> Kept:
        """Return the pages of a layer, its states, or both."""
        like = self._cache.layer(layer_idx)
        if like is None:
            return None
        if isinstance(like, JointKept):
            return JointKept(self._pages(layer_idx, like.pages), self._states_like(like.states))
        if isinstance(like, IndexedKept):
            index = self._pages(layer_idx, like.index, of_indexer=True)
            assert isinstance(index, PagedLatents)
            return IndexedKept(self._pages(layer_idx, like.pages), index)
        if isinstance(like, NGramKept):
            return NGramKept(*map(self._states_like, (like.states, like.tokens, like.inputs)))
        if isinstance(like, RecurrentStates):
            return self._states_like(like)
        return self._pages(layer_idx, like)

    def _states_like(self, like: RecurrentStates) -> RecurrentStates:
        if like.recurrence not in self._states:
            self._states[like.recurrence] = like.scratch(self._num_sequences)
        return self._states[like.recurrence]

    def _pages(self, layer_idx: int, like: Pages, *, of_indexer: bool = False) -> Pages:
        key = like.heads_and_width, of_indexer, self._cache.shared.get(layer_idx)
        made = self._made.get(key) or self._made.setdefault(
            key, like.empty_like(self._num_blocks, self._block_size)
        )
        if isinstance(made, PagedKV) and isinstance(like, PagedKV) and like.format == FP8_STATIC:
            return replace(made, k_scale=like.k_scale, v_scale=like.v_scale)
        return made
