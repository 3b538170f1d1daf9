"""One pass that scores whole sequences: prefill over pages of its own, which no other pass sees.

Shapes: B sequences, N blocks of the longest, T rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from compress.kernels.operands.paged import FP8_STATIC, PagedKV
from compress.kernels.operands.paged_latents import Pages
from compress.kernels.problem import Phase
from compress.models.arch import Arch
from compress.runtime.chunked_attention import chunk_sizes
from compress.runtime.kv_cache import KVCache
from compress.runtime.latent_attention import LatentAttention
from compress.runtime.layer_attention import Attend, LayerAttention

_SCRATCH_BLOCK = 64


@dataclass(frozen=True)
class ScoringPass:
    """The arguments of a layer other than its weights and the stream: positions [T], slots [T], the pages of
    a layer, attention, and the phase whose kernels serve."""

    positions_T: torch.Tensor
    slots_T: torch.Tensor
    pages: Callable[[int], Pages]
    attend: Attend
    phase: Phase


def scratch_block_size(arch: Arch, max_model_len: int) -> int:
    """Return the positions of a block of the pages, of which chunks of attention are whole numbers."""
    return math.gcd(_SCRATCH_BLOCK, *chunk_sizes(arch, max_model_len))


def scoring_pass(
    attention: LayerAttention | LatentAttention,
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
    first_block = 1 + torch.arange(len(lens)).unsqueeze(1) * num_columns
    table_BN = (first_block + torch.arange(num_columns)).to(device)
    positions = [torch.arange(length) for length in lens]
    slots = [int(first) * block_size + each for first, each in zip(first_block, positions, strict=True)]
    pages = _ScratchPages(cache, 1 + len(lens) * num_columns, block_size)
    phase: Phase = "decode" if short else "prefill"
    attend = attention.prefill(table_BN, lens, lens, block_size=block_size, phase=phase)
    return ScoringPass(
        torch.cat(positions).to(device), torch.cat(slots).to(device), pages.layer, attend, phase
    )


class _ScratchPages:
    """Pages for one pass in the format of the cache; layers of the same shape share them."""

    def __init__(self, cache: KVCache, num_blocks: int, block_size: int) -> None:
        self._cache = cache
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._made: dict[tuple[int, int], Pages] = {}

    def layer(self, layer_idx: int) -> Pages:
        """Return the pages of a layer."""
        like = self._cache.layer(layer_idx)
        key = like.heads_and_width
        made = self._made.get(key) or self._made.setdefault(
            key, like.empty_like(self._num_blocks, self._block_size)
        )
        if isinstance(made, PagedKV) and isinstance(like, PagedKV) and like.format == FP8_STATIC:
            return replace(made, k_scale=like.k_scale, v_scale=like.v_scale)
        return made
